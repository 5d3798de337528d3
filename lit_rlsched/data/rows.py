"""Rows of prompts from whatever holds them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.data.characters import check_characters, decode
from lit_rlsched.data.tasks import HubDataset, PromptTask

Row = dict[str, Any]

# Not `dict[str, Any]`: jsonargparse (4.53) would turn the answer "2" of a row in a config into 2.
Rows = PromptTask | list[dict] | str | Path  # type: ignore[type-arg]
"""A file (.jsonl, .json, .parquet), a folder saved by `datasets.save_to_disk`, a hub data set
(`name` or `name:split`), rows, a `datasets.Dataset`, or a task that makes rows."""


def load_rows(spec: Rows | Any, *, split: str | None = None) -> list[Row]:
    """Read rows with a `prompt`, perhaps a `uid`, and columns for the reward functions.

    Args:
        spec: see `Rows`.
        split: which split of a hub data set or of a saved `DatasetDict`; `train` unless given.

    Raises:
        ValueError: a row is not usable; the message names the data set, the row and the column.
    """
    rows: list[Row]
    name = type(spec).__name__
    if isinstance(spec, PromptTask):
        rows = spec.rows()
    elif isinstance(spec, str | Path):
        rows, name = _read(str(spec), split), str(spec)
    elif isinstance(spec, list | tuple):
        rows, name = list(spec), "rows"
    elif hasattr(spec, "to_list"):
        rows = spec.to_list()
    else:
        raise TypeError(
            f"Cannot read prompts from a {name}. Use a path to a .jsonl, .json or "
            ".parquet file, a folder of `datasets.save_to_disk`, a hub name, a `datasets.Dataset`, "
            "a list of dicts, or a task such as `Countdown`."
        )
    if not rows:
        raise ValueError(f"The data set `{name}` is empty.")
    for number, row in enumerate(rows):
        check_row(row, f"`{name}`, row {number} (the first is 0)")
    return rows


def _read(spec: str, split: str | None) -> list[Row]:
    path = Path(spec).expanduser()
    if path.is_dir():
        return _read_folder(path, split)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise FileNotFoundError(f"There is no file `{path}` to read prompts from.")
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        return _read_jsonl(path) if path.suffix == ".jsonl" else _read_json(path)
    if path.exists() or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        problem = "is not a file of a kind that is read" if path.exists() else "does not exist"
        raise ValueError(
            f"`{spec}` {problem}. Use a .jsonl, .json or .parquet file, a folder of "
            "`datasets.save_to_disk`, or the name of a data set on the Hugging Face hub."
        )
    name, _, suffix = spec.partition(":")
    return HubDataset(name, split=split or suffix or "train").rows()


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if line := decode(raw, path, number).strip():
                where = f"`{path}`, line {number}"
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where} is not JSON: {error}.") from None
                check_row(rows[-1], where)
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(decode(path.read_bytes(), path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`{path}` is not JSON: {error}. Name it .jsonl if each line is a row."
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"`{path}` holds a {type(rows).__name__}. It must hold a list of rows.")
    return rows


def _read_folder(path: Path, split: str | None) -> list[Row]:
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"`{path}` is a folder, but not one that `datasets.save_to_disk` wrote. "
            "Give the path of a file in it."
        )
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        split = split or "train"
        if split not in saved:
            raise ValueError(f"`{path}` has no split `{split}`. It has {sorted(saved)}.")
        saved = saved[split]
    return saved.to_list()


def check_row(row: Any, where: str) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}. It must be a dict of columns.")
    if "prompt" not in row:
        raise ValueError(
            f"{where} has no column `prompt`; its columns are {sorted(map(str, row))}. "
            "Rename the one that holds the prompt."
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{where} has an empty `prompt`. Drop or fill the row.")
        check_characters(prompt, where)
        return
    if not isinstance(prompt, Sequence) or not all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt
    ):
        raise ValueError(
            f"{where} has a `prompt` that is neither a string nor chat messages, a list of dicts "
            f"with `role` and `content`: {str(prompt)[:80]!r}."
        )
    if not prompt or not any(message["content"] for message in prompt):
        raise ValueError(f"{where} has an empty `prompt`. Drop or fill the row.")
    for message in prompt:
        check_characters(str(message["content"]), where)
