"""Rows of prompts, read from files, folders, data sets and tasks into memory-mapped Arrow."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_rlsched.data.arrow_cache import BATCH, digest, mapped
from lit_rlsched.data.row_table import Row, RowTable, record_batch
from lit_rlsched.data.tasks import HubDataset, PromptTask

# Not `dict[str, Any]`: jsonargparse (4.53) would turn the answer "2" of a row in a config into 2.
Rows = PromptTask | list[dict] | str | Path  # type: ignore[type-arg]
"""A file (.jsonl, .json, .parquet), a folder saved by `datasets.save_to_disk`, a hub data set
(`name` or `name:split`), rows, a `datasets.Dataset`, or a task that makes rows."""

_FORMAT = "rows-2"
"""Changes when rows are stored in another way."""
_OTHER_FORMATS = {
    b"\x1f\x8b": ("is compressed with gzip", "Unpack it: `gunzip`."),
    b"\xff\xfe": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    b"\xfe\xff": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def load_rows(spec: Rows | Any) -> RowTable:
    """Read rows that have a `prompt`, optionally a `uid`, and columns for the reward functions.

    The first call writes them to an Arrow file in the cache of `datasets`; further calls on the
    same content map that file. Rows with values that JSON cannot hold stay in memory.

    Args:
        spec: See `Rows`. Of a saved `DatasetDict` the split `train` is read.

    Raises:
        ValueError: a row is not usable; the message names the data set, the row and the column.
    """
    if isinstance(spec, str | Path):
        return _read(str(spec))
    if is_stream(spec):
        raise TypeError(
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
    raise TypeError(
        f"Cannot read prompts from a {type(spec).__name__}. Use a path to a .jsonl, .json or "
        ".parquet file, a folder of `datasets.save_to_disk`, a hub name, a `datasets.Dataset`, "
        "a list of dicts, or a task such as `Countdown`."
    )


def is_stream(spec: Any) -> bool:
    """Return whether rows come from a `datasets.IterableDataset`, whose size is not known."""
    if isinstance(spec, HubDataset):
        return spec.streaming
    return type(spec).__name__ == "IterableDataset" and hasattr(spec, "set_epoch")


def open_stream(spec: Any) -> Any:
    """Return the `datasets.IterableDataset`."""
    return spec.dataset() if isinstance(spec, HubDataset) else spec


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
            raise FileNotFoundError(f"There is no file `{path}` to read prompts from.")
        if path.suffix == ".json":
            return _of_list(_read_json(path), spec)
        with path.open("rb") as file:
            key = digest(_FORMAT, path.suffix, hashlib.file_digest(file, "sha256").hexdigest())
        if path.suffix == ".parquet":
            return RowTable(mapped(key, lambda: _of_tables(_read_parquet(path), spec)), key)
        return RowTable(mapped(key, lambda: _of_lines(path)), key)
    if path.exists() or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        problem = "has a format that cannot be read" if path.exists() else "does not exist"
        raise ValueError(
            f"`{spec}` {problem}. Use a .jsonl, .json or .parquet file, a folder of "
            "`datasets.save_to_disk`, or the name of a data set on the Hugging Face hub."
        )
    name, _, split = spec.partition(":")
    return _of_dataset(HubDataset(name, split=split or "train").dataset(), spec)


def _of_dataset(data: Any, name: str) -> RowTable:
    key = digest(_FORMAT, data._fingerprint, len(data))
    tables = data.with_format("arrow").iter(BATCH)
    return RowTable(mapped(key, lambda: _of_tables(tables, name)), key)


def _of_tables(tables: Iterable[pa.Table], name: str) -> Iterator[pa.RecordBatch]:
    first = 0
    for table in tables:
        for batch in table.combine_chunks().to_batches(BATCH):
            rows = batch.to_pylist()
            _check_rows(rows, name, first)
            yield record_batch(rows, first, batch.to_struct_array())
            first += len(rows)
    _check_some(first, name)


def _of_list(rows: Sequence[Any], name: str) -> RowTable:
    _check_some(len(rows), name)
    _check_rows(rows, name)
    if not all(map(is_json, rows)):
        batch = record_batch(rows, 0, [""] * len(rows))
        return RowTable(pa.Table.from_batches([batch]), None, rows)
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps(row).encode() + b"\n")
    key = digest(_FORMAT, content.hexdigest())
    return RowTable(mapped(key, lambda: _batches(rows)), key)


def _batches(rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(rows), BATCH):
        some = rows[first : first + BATCH]
        yield record_batch(some, first, list(map(json.dumps, some)))


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
            if not (line := _decode(raw, path, number).strip()):
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{at(number)} is not JSON: {error}.") from None
            texts.append(line)
            check_row(rows[-1], number, at)
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


def _open_folder(path: Path) -> Any:
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
    return saved


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


def _check_some(number: int, name: str) -> None:
    if not number:
        raise ValueError(f"The data set `{name}` is empty.")


def _check_rows(rows: Sequence[Any], name: str, first: int = 0) -> None:
    def at(number: int) -> str:
        return f"`{name}`, row {number} (the first is 0)"

    for number, row in enumerate(rows, start=first):
        check_row(row, number, at)


def check_row(row: Any, number: int, at: Callable[[int], str]) -> None:
    """Refuse an unusable row; `at` says where a row is."""
    text = row.get("prompt") if type(row) is dict else None
    if type(text) is str and text and text.isascii() and not text.isspace():
        return  # most rows: the checks below take four times as long
    if not isinstance(row, Mapping):
        raise ValueError(f"{at(number)} is a {type(row).__name__}. It must be a dict of columns.")
    if "prompt" not in row:
        raise ValueError(
            f"{at(number)} has no column `prompt`; its columns are "
            f"{sorted(map(str, row))}. Rename the one that holds the prompt."
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        contents = [prompt] if prompt.strip() else []
    elif isinstance(prompt, Sequence) and all(map(_is_message, prompt)):
        contents = [message["content"] for message in prompt]
    else:
        raise ValueError(
            f"{at(number)} has a `prompt` that is neither a string nor chat messages, a "
            f"list of dicts with `role` and `content`: {str(prompt)[:80]!r}."
        )
    if not any(contents):
        raise ValueError(f"{at(number)} has an empty `prompt`. Drop or fill the row.")
    for content in map(str, contents):
        # no tokenizer takes half of a surrogate pair, such as JSON's "\ud83d"
        if not content.isascii() and (found := _SURROGATE.search(content)) is not None:
            raise ValueError(
                f"{at(number)} has half of a surrogate pair in its `prompt` "
                f"({found[0]!a} at character {found.start()}), which is not a character. Repair "
                "or drop the row."
            )


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and {"role", "content"} <= message.keys()
