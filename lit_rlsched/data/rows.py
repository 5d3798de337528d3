"""Rows of prompts, read from files, folders, data sets and tasks into memory-mapped Arrow."""

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_rlsched.data.messages import NO_PROMPT, normalized
from lit_rlsched.data.reading import (
    decoded,
    each,
    for_each,
    json_of,
    located,
    naming,
    of_batch,
    read_json,
)
from lit_rlsched.data.row_table import BATCH, Row, RowTable, digest, mapped, record_batch
from lit_rlsched.data.tasks import HubDataset, PromptTask
from lit_rlsched.settings import UsageError

# Not `dict[str, Any]`: jsonargparse (4.53) would turn the answer "2" of a row in a config into 2.
Rows = PromptTask | list[dict] | str | Path  # type: ignore[type-arg]
"""A file (.jsonl, .json, .parquet), a folder saved by `datasets.save_to_disk`, a hub data set
(`name` or `name:split`), rows, a `datasets.Dataset`, or a task that makes rows."""

_FORMAT = "rows-4"
"""Changes when rows are stored in another way."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Columns that other trainers give to the model beside the prompt."""
_AS_STORED = ("Value", "ClassLabel", "Translation", "TranslationVariableLanguages")
"""Features of `datasets` whose values Arrow stores as they are."""


def load_rows(spec: Rows | Any, has_objects: bool = False) -> RowTable:
    """Read rows that have a `prompt`, optionally a `uid`, and columns for the reward functions.

    The first call writes them to an Arrow file in the cache of `datasets`; further calls on the
    same content map that file. Rows with values that JSON cannot hold stay in memory.

    The rows of a `datasets.Dataset` are those of `dataset[i]`: decoded, and with its transform,
    applied once. Formats such as `torch` are left out: rows have plain Python values. Messages are
    normalized: no entry is None, and the content is a string.
    """
    with naming("rows" if isinstance(spec, list | tuple) else name_of(spec)):
        table = _load(spec)
    if has_objects:
        return table.told_apart()
    for columns, number in table.column_sets.items():
        check_prompt(columns, _at(name_of(spec), number))
    return table


def _load(spec: Rows | Any) -> RowTable:
    if isinstance(spec, str | Path):
        return _read(str(spec))
    spec = _one_split(spec, type(spec).__name__)
    if is_stream(spec):
        raise UsageError(
            "`load_rows` reads data sets of known size, and this is a stream (`IterableDataset`). "
            "`train_data` may be one. For held-out data take some of its rows: "
            "`datasets.Dataset.from_list(list(stream.take(200)))`."
        )
    if isinstance(spec, HubDataset):
        return _of_dataset(spec.dataset(), type(spec).__name__)
    if isinstance(spec, PromptTask):
        return _of_list(spec.rows(), type(spec).__name__)
    if isinstance(spec, list | tuple):
        return _of_list(spec, "rows")
    if hasattr(spec, "with_format") and hasattr(spec, "to_list"):
        return _of_dataset(spec, type(spec).__name__)
    raise UsageError(
        f"Cannot read prompts from a {type(spec).__name__}. Use a path to a .jsonl, .json or "
        ".parquet file, a folder of `datasets.save_to_disk`, a hub name, a `datasets.Dataset`, "
        "a list of dicts, or a task such as `Countdown`."
    )


def is_stream(spec: Any) -> bool:
    """Return whether rows come from a `datasets.IterableDataset`, whose size is not known."""
    if isinstance(spec, HubDataset):
        return spec.streaming
    return type(spec).__name__ in ("IterableDataset", "IterableDatasetDict")


def open_stream(spec: Any) -> Any:
    """Return the `datasets.IterableDataset`, whose rows have plain Python values."""
    with naming(name_of(spec)):
        stream = spec.dataset() if isinstance(spec, HubDataset) else spec
    return _one_split(stream, type(stream).__name__).with_format(None)


def name_of(spec: Rows | Any) -> str:
    """Return a short name of a data set, for people: see `Rows`."""
    if isinstance(spec, str | Path):
        return str(spec)
    return f"{len(spec)} rows" if isinstance(spec, list | tuple) else type(spec).__name__


def _read(spec: str) -> RowTable:
    path = Path(spec).expanduser()
    if path.is_dir():
        return _of_dataset(_open_folder(path), spec)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise UsageError(f"There is no file `{path}` to read prompts from.")
        if path.suffix == ".json":
            return _of_list(read_json(path, partial(_at, spec)), spec)
        with path.open("rb") as file:
            key = digest(_FORMAT, path.suffix, hashlib.file_digest(file, "sha256").hexdigest())
        if path.suffix == ".jsonl":
            return RowTable(mapped(key, lambda: _of_lines(path)), key)
        if _is_encoded_parquet(path):
            return _of_rows(lambda: _open_parquet(path, key), key, spec)
        return RowTable(mapped(key, lambda: _of_tables(_read_parquet(path), spec)), key)
    if path.exists() or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        problem = "has a format that cannot be read" if path.exists() else "does not exist"
        raise UsageError(
            f"`{spec}` {problem}. Use a .jsonl, .json or .parquet file, a folder of "
            "`datasets.save_to_disk`, or the name of a data set on the Hugging Face hub."
        )
    name, _, split = spec.partition(":")
    return _of_dataset(HubDataset(name, split=split or "train").dataset(), spec)


def _of_dataset(data: Any, name: str) -> RowTable:
    form = data.format
    if form["type"] == "custom":  # a transform, which may give other values each time
        return _of_list([*each(data, partial(_at, name))], name)
    if not form["output_all_columns"] and {*form["columns"]} != {*data.column_names}:
        data = data.select_columns(form["columns"])
    key = digest(_FORMAT, data._fingerprint, len(data))
    if _is_encoded(data.features):
        return _of_rows(lambda: data.with_format(None), key, name)
    tables = data.with_format("arrow").iter(BATCH)
    return RowTable(mapped(key, lambda: _of_tables(tables, name)), key)


def _is_encoded(feature: Any) -> bool:
    """Whether a feature of `datasets` stores values in another form, such as JSON as text."""
    if isinstance(feature, Mapping):
        return any(map(_is_encoded, feature.values()))
    if (inner := getattr(feature, "feature", None)) is not None:  # of a list
        return _is_encoded(inner)
    return type(feature).__name__ not in _AS_STORED


class _NotJson(Exception):
    pass


def _of_rows(opened: Callable[[], Iterable[Any]], key: str, name: str) -> RowTable:
    """Store the rows of a `datasets.Dataset` that decodes them as JSON."""

    def batches() -> Iterator[pa.RecordBatch]:
        rows, first = each(opened(), partial(_at, name)), 0
        while some := [*islice(rows, BATCH)]:
            some = _checked(some, name, first)
            if not _are_json(some, name, first):
                raise _NotJson
            yield record_batch(some, first, _dumped(some, name, first))
            first += len(some)
        _check_some(first, name)

    try:
        return RowTable(mapped(key, batches), key)
    except _NotJson:
        return _of_list([*each(opened(), partial(_at, name))], name)


def _of_tables(tables: Iterable[pa.Table], name: str) -> Iterator[pa.RecordBatch]:
    first, at = 0, partial(_at, name)
    for table in each(map(_valid, tables), at):
        for batch in table.combine_chunks().to_batches(BATCH):
            rows = _checked(of_batch(batch, at, first), name, first)
            yield record_batch(rows, first, batch.to_struct_array())
            first += len(rows)
    _check_some(first, name)


def _valid(table: pa.Table) -> pa.Table:
    """Refuse what would end the process: places of values outside a damaged file."""
    table.validate(full=True)
    return table


def _of_list(rows: Sequence[Any], name: str) -> RowTable:
    _check_some(len(rows), name)
    rows = _checked(rows, name)
    if not _are_json(rows, name):
        for_each(lambda row, _: pickle.dumps(row), rows, partial(_at, name))  # rewards get them
        batch = record_batch(rows, 0, [""] * len(rows))
        return RowTable(pa.Table.from_batches([batch]), None, rows)
    content = hashlib.sha256()
    for first in range(0, len(rows), BATCH):
        for text in _dumped(rows[first : first + BATCH], name, first):
            content.update(text.encode() + b"\n")
    key = digest(_FORMAT, content.hexdigest())
    return RowTable(mapped(key, lambda: _batches(rows)), key)


def _batches(rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(rows), BATCH):
        some = rows[first : first + BATCH]
        yield record_batch(some, first, list(map(json.dumps, some)))


def _are_json(rows: Sequence[Row], name: str, first: int = 0) -> bool:
    return all(for_each(lambda row, _: is_json(row), rows, partial(_at, name), first))


def _dumped(rows: Sequence[Row], name: str, first: int = 0) -> list[str]:
    return for_each(lambda row, _: json.dumps(row), rows, partial(_at, name), first)


def is_json(value: Any) -> bool:
    """Return whether JSON gives back the same value, of the same type."""
    kind = type(value)
    if kind is list:
        return all(map(is_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_json, value.values()))
    return kind in (str, int, float, bool, type(None))


def _of_lines(path: Path) -> Iterator[pa.RecordBatch]:
    def at(number: int) -> str:
        return f"`{path}`, line {number}"

    first, rows, texts = 0, [], []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not (line := decoded(raw, path, number).strip()):
                continue
            with located(partial(at, number)):
                try:
                    rows.append(check_row(json_of(line), number, at))
                except json.JSONDecodeError as error:
                    raise UsageError(f"{at(number)} is not JSON: {error}.") from None
            texts.append(line)
            if len(rows) == BATCH:
                yield record_batch(rows, first, texts)
                first, rows, texts = first + BATCH, [], []
    if rows:
        yield record_batch(rows, first, texts)
    _check_some(first + len(rows), str(path))


def _read_parquet(path: Path) -> Iterator[pa.Table]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from map(pa.Table.from_batches, ([batch] for batch in file.iter_batches(BATCH)))


def _is_encoded_parquet(path: Path) -> bool:
    """Whether a file has values that `datasets` decodes, by its metadata or Arrow's JSON type."""
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(path)
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise UsageError(f"`{path}` has two columns `{twice[0]}`. Rename or remove one of them.")
    if b"huggingface" not in (schema.metadata or {}) and "extension<" not in str(schema):
        return False
    from datasets import Features

    return _is_encoded(Features.from_arrow_schema(schema))


def _open_parquet(path: Path, key: str) -> Any:
    import pyarrow.parquet
    from datasets import Dataset

    return Dataset(pyarrow.parquet.read_table(path), fingerprint=key)


def _open_folder(path: Path) -> Any:
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise UsageError(
            f"`{path}` is a folder, but not one that `datasets.save_to_disk` wrote. "
            "Give the path of a file in it."
        )
    return _one_split(datasets.load_from_disk(str(path)), str(path))


def _one_split(data: Any, name: str) -> Any:
    """Return the split `train` of a `DatasetDict`, and other data as they are."""
    if type(data).__name__ not in ("DatasetDict", "IterableDatasetDict"):
        return data
    if "train" not in data:
        raise UsageError(
            f"`{name}` has no split `train`, only {sorted(data)}. Give one split: "
            "`data['test']`, or its folder."
        )
    return data["train"]


def _check_some(number: int, name: str) -> None:
    if not number:
        raise UsageError(f"The data set `{name}` is empty.")


def _checked(rows: Sequence[Any], name: str, first: int = 0) -> list[Row]:
    at = partial(_at, name)
    return for_each(partial(check_row, at=at), rows, at, first)


def _at(name: str, number: int) -> str:
    return f"`{name}`, row {number} (the first is 0)"


def check_prompt(columns: Collection[Any], at: str) -> None:
    """Refuse a row without a prompt."""
    if "prompt" not in columns:
        raise UsageError(
            f"{at} has no column `prompt`, or an empty one; its columns are "
            f"{sorted(map(str, columns))}. Rename the one that holds the prompt."
        )


def check_row(row: Any, number: int, at: Callable[[int], str]) -> Row:
    """Return a row with its messages normalized."""
    text = row.get("prompt") if type(row) is dict else None
    plain = type(text) is str and text and text.isascii() and not text.isspace()
    if plain and _MEDIA.isdisjoint(row):
        return row  # most rows: the checks below take four times as long
    if not isinstance(row, Mapping):
        raise UsageError(f"{at(number)} is a {type(row).__name__}. It must be a dict of columns.")
    if media := [name for name in sorted(_MEDIA & row.keys()) if not _is_empty(row[name])]:
        raise UsageError(
            f"{at(number)} has `{media[0]}`, and training is on text alone: the model would answer "
            "without it. Leave such rows out. If the prompt does not need it, remove the column, "
            "or rename it if a reward function does."
        )
    if (prompt := row.get("prompt")) is None:
        return normalized(row)
    chat = isinstance(prompt, Sequence) and all(isinstance(one, Mapping) for one in prompt)
    if not isinstance(prompt, str) and not chat:
        raise UsageError(
            f"{at(number)} has a `prompt` that is neither a string nor chat messages, a "
            f"list of dicts with `role` and `content`: {str(prompt)[:80]!r}."
        )
    try:
        row = normalized(row)
    except ValueError as error:
        raise UsageError(f"{at(number)} {error}") from None
    if isinstance(prompt, str):
        contents = [prompt.strip() and prompt]
    else:
        contents = [message["content"] for message in row["prompt"]]
    if not any(contents) and prompt != NO_PROMPT:
        raise UsageError(f"{at(number)} has an empty `prompt`. Drop or fill the row.")
    for content in contents:
        # no tokenizer takes half of a surrogate pair, such as JSON's "\ud83d"
        if not content.isascii() and (found := _SURROGATE.search(content)) is not None:
            raise UsageError(
                f"{at(number)} has half of a surrogate pair in its `prompt` "
                f"({found[0]!a} at character {found.start()}), which is not a character. Repair "
                "or drop the row."
            )
    return row


def _is_empty(value: Any) -> bool:
    """Whether a column of images and the like holds none."""
    if isinstance(value, Mapping):  # `datasets` stores an image as bytes and path
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return value is None or value == ""
