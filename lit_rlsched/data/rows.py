"""Rows of prompts, read from files, folders, data sets and tasks."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.data.tasks import HubDataset, PromptTask

Row = dict[str, Any]

# Not `dict[str, Any]`: jsonargparse (4.53) would turn the answer "2" of a row in a config into 2.
Rows = PromptTask | list[dict] | str | Path  # type: ignore[type-arg]
"""A file (.jsonl, .json, .parquet), a folder saved by `datasets.save_to_disk`, a hub data set
(`name` or `name:split`), rows, a `datasets.Dataset`, or a task that makes rows."""

_OTHER_FORMATS = {
    b"\x1f\x8b": ("is compressed with gzip", "Unpack it: `gunzip`."),
    b"\xff\xfe": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    b"\xfe\xff": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def load_rows(spec: Rows | Any) -> list[Row]:
    """Read rows that have a `prompt`, optionally a `uid`, and columns for the reward functions.

    Args:
        spec: See `Rows`. Of a saved `DatasetDict` the split `train` is read.

    Raises:
        ValueError: a row is not usable; the message names the data set, the row and the column.
    """
    rows: list[Row]
    name = type(spec).__name__
    if isinstance(spec, PromptTask):
        rows = spec.rows()
    elif isinstance(spec, str | Path):
        rows, name = _read(str(spec)), str(spec)
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
        _check_row(row, f"`{name}`, row {number} (the first is 0)")
    return rows


def name_of(spec: Rows | Any) -> str:
    """Return a short name of a data set, for people: see `Rows`."""
    if isinstance(spec, str | Path):
        return str(spec)
    return f"{len(spec)} rows" if isinstance(spec, list | tuple) else type(spec).__name__


def _read(spec: str) -> list[Row]:
    path = Path(spec).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise FileNotFoundError(f"There is no file `{path}` to read prompts from.")
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        return _read_jsonl(path) if path.suffix == ".jsonl" else _read_json(path)
    if path.exists() or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        problem = "has a format that cannot be read" if path.exists() else "does not exist"
        raise ValueError(
            f"`{spec}` {problem}. Use a .jsonl, .json or .parquet file, a folder of "
            "`datasets.save_to_disk`, or the name of a data set on the Hugging Face hub."
        )
    name, _, split = spec.partition(":")
    return HubDataset(name, split=split or "train").rows()


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if line := _decode(raw, path, number).strip():
                where = f"`{path}`, line {number}"
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where} is not JSON: {error}.") from None
                _check_row(rows[-1], where)
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(_decode(path.read_bytes(), path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`{path}` is not JSON: {error}. Name it .jsonl if each line is a row."
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"`{path}` holds a {type(rows).__name__}. It must hold a list of rows.")
    return rows


def _read_folder(path: Path) -> list[Row]:
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"`{path}` is a folder, but not one that `datasets.save_to_disk` wrote. "
            "Give the path of a file in it."
        )
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        if "train" not in saved:
            raise ValueError(
                f"`{path}` has no split `train`, only {sorted(saved)}. Give the folder of a split."
            )
        saved = saved["train"]
    return saved.to_list()


def _decode(raw: bytes, path: Path, line: int = 1) -> str:
    """Decode UTF-8, without a byte order mark; `line` is the number of the first line in `raw`."""
    if line == 1 and raw[:2] in _OTHER_FORMATS:
        what, fix = _OTHER_FORMATS[raw[:2]]
        raise ValueError(f"`{path}`, line 1: the file {what}, not UTF-8. {fix}")
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        number = line + raw.count(b"\n", 0, error.start)
        raise ValueError(
            f"`{path}`, line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}). If the file is "
            "Latin-1, convert it: `iconv -f LATIN1 -t UTF-8`."
        ) from None


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}. It must be a dict of columns.")
    if "prompt" not in row:
        raise ValueError(
            f"{where} has no column `prompt`; its columns are {sorted(map(str, row))}. "
            "Rename the one that holds the prompt."
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        contents = [prompt] if prompt.strip() else []
    elif isinstance(prompt, Sequence) and all(map(_is_message, prompt)):
        contents = [message["content"] for message in prompt]
    else:
        raise ValueError(
            f"{where} has a `prompt` that is neither a string nor chat messages, a list of dicts "
            f"with `role` and `content`: {str(prompt)[:80]!r}."
        )
    if not any(contents):
        raise ValueError(f"{where} has an empty `prompt`. Drop or fill the row.")
    for content in contents:  # no tokenizer takes half of a surrogate pair, such as JSON's "\ud83d"
        if (found := _SURROGATE.search(str(content))) is not None:
            raise ValueError(
                f"{where} has half of a surrogate pair in its `prompt` ({found[0]!a} at character "
                f"{found.start()}), which is not a character. Repair or drop the row."
            )


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and {"role", "content"} <= message.keys()
