"""Rows of prompts, read from files, folders, data sets and tasks; errors name row and column."""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_rlsched.data.messages import check_prompt, check_row
from lit_rlsched.data.row_table import BATCH, Row, RowTable, digest, mapped, record_batch
from lit_rlsched.data.tasks import HubDataset, PromptTask
from lit_rlsched.settings import UsageError

# Not `dict[str, Any]`: jsonargparse (4.53) would turn the answer "2" of a row in a config into 2.
Rows = PromptTask | list[dict] | str | Path  # type: ignore[type-arg]
"""A file (.jsonl, .json, .parquet), a folder saved by `datasets.save_to_disk`, a hub data set
(`name` or `name:split`), rows, a `datasets.Dataset`, or a task that makes rows."""

_FORMAT = "rows-5"
"""Changes when rows are stored in another way."""
_OTHER_FORMATS = {
    b"\x1f\x8b": ("is compressed with gzip", "Unpack it: `gunzip`."),
    b"\xff\xfe": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    b"\xfe\xff": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
}
At = Callable[[int], str]
"""Says where the row with a number is."""


def load_rows(spec: Rows | Any, has_objects: bool = False) -> RowTable:
    """Read rows that have a `prompt`, optionally a `uid`, and columns for the reward functions.

    The first call writes them, or for a `datasets.Dataset` their uids, to an Arrow file in the
    cache of `datasets`; further calls on the same content map that file. Rows of a list with values
    that JSON cannot hold stay in memory. Rows have plain Python values, whatever the data set's
    format, and normalized messages.
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
    if isinstance(spec, list | tuple):
        return _of_list(spec, "rows")
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
            return _of_list(_read_json(path, partial(_at, spec)), spec)
        with path.open("rb") as file:
            key = digest(_FORMAT, path.suffix, hashlib.file_digest(file, "sha256").hexdigest())
        if path.suffix == ".jsonl":
            return RowTable(mapped(key, lambda: _of_lines(path)), key)
        return _of_dataset(_open_parquet(path, key), spec)
    if path.exists() or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        problem = "has a format that cannot be read" if path.exists() else "does not exist"
        raise UsageError(
            f"`{spec}` {problem}. Use a .jsonl, .json or .parquet file, a folder of "
            "`datasets.save_to_disk`, or the name of a data set on the Hugging Face hub."
        )
    name, _, split = spec.partition(":")
    return _of_dataset(HubDataset(name, split=split or "train").dataset(), spec)


def _of_dataset(data: Any, name: str) -> RowTable:
    at = partial(_at, name)
    _check_some(len(data), name)
    form = data.format
    if form["type"] == "custom":  # a transform, which may give other values each time
        return _of_list([*each(data, at)], name)
    if not form["output_all_columns"] and {*form["columns"]} != {*data.column_names}:
        data = data.select_columns(form["columns"])
    written = [Path(file["filename"]).stat().st_mtime_ns for file in data.cache_files]
    key = digest(_FORMAT, data._fingerprint, len(data), written)
    data = data.with_format(None)

    def batches() -> Iterator[pa.RecordBatch]:
        data.data.validate(full=True)  # values outside a damaged file would end the process
        rows, first = each(data, lambda number: at(number) + _bad_column(data, number)), 0
        while some := [*islice(rows, BATCH)]:
            yield record_batch(_checked(some, name, first), first)
            first += len(some)

    return RowTable(mapped(key, batches), key, data)


def _bad_column(data: Any, number: int) -> str:
    """Say which column of a row cannot be read."""
    for name in data.column_names:
        try:
            data.select_columns([name])[number]
        except Exception:
            return f", column `{name}`,"
    return ""


def _of_list(rows: Sequence[Any], name: str) -> RowTable:
    _check_some(len(rows), name)
    rows, at = _checked(rows, name), partial(_at, name)
    if not all(for_each(lambda row, _: is_json(row), rows, at)):
        for_each(lambda row, _: pickle.dumps(row), rows, at)  # rewards get them
        return RowTable(pa.Table.from_batches([record_batch(rows, 0)]), None, rows)
    texts = for_each(lambda row, _: json.dumps(row), rows, at)
    key = digest(_FORMAT, *texts)
    batches = (
        record_batch(rows[i : i + BATCH], i, texts[i : i + BATCH])
        for i in range(0, len(rows), BATCH)
    )
    return RowTable(mapped(key, lambda: batches), key)


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


def _open_parquet(path: Path, key: str) -> Any:
    import pyarrow.parquet
    from datasets import Dataset
    from datasets.table import InMemoryTable

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(
                f"`{path}` has two columns `{twice[0]}`. Rename or remove one of them."
            )
        _check_some(file.metadata.num_rows, str(path))
        table = mapped(digest("parquet", key), lambda: file.iter_batches(BATCH))
    return Dataset(InMemoryTable(table), fingerprint=key)


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


@contextmanager
def located(at: Callable[[], str]) -> Iterator[None]:
    """Let what a library raises in the block say where the data are."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        why = f"{error!s:.300}".strip().rstrip(".")
        if isinstance(error, RecursionError):
            why = "lists or dicts are nested too deeply"
        raise UsageError(
            f"{at()} cannot be read ({type(error).__name__}: {why}). Repair it or leave it out; a "
            "file may have been cut short."
        ) from error


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let whatever is raised in the block name the data set."""
    try:
        with located(lambda: f"`{name}`"):
            yield
    except UsageError as error:
        if name in str(error):
            raise
        raise UsageError(f"`{name}`: {error}") from error


def each(rows: Iterable[Any], at: At) -> Iterator[Any]:
    """Yield rows, or batches of them: an error names the row behind those that were yielded."""
    iterator, number = iter(rows), 0
    while True:
        with located(partial(at, number)):
            try:
                row = next(iterator)
            except StopIteration:
                return
        yield row
        number += getattr(row, "num_rows", 1)


def for_each(
    call: Callable[[Any, int], Any], rows: Iterable[Any], at: At, first: int = 0
) -> list[Any]:
    """Call a function with each row and its number: an error names the row, and the column."""
    row, number, results = None, first, []
    with located(lambda: f"{at(number)}{_column(call, row, number)}"):
        for number, row in enumerate(rows, start=first):
            results.append(call(row, number))
    return results


def _column(call: Callable[[Any, int], Any], row: Any, number: int) -> str:
    for name, value in row.items() if isinstance(row, Mapping) else ():
        try:
            call({name: value}, number)
        except UsageError:
            pass
        except Exception:
            return f", column `{name}`,"
    return ""


def json_of(text: str) -> Any:
    """Read JSON, and refuse an object that has a key twice, as one of its values would be lost."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key `{twice}` twice")
    return found


def _read_json(path: Path, at: At) -> list[Any]:
    """Read a file that holds a list of rows."""
    text = decoded(path.read_bytes(), path)
    with located(lambda: _place(text, path, at)):
        try:
            rows = json_of(text)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"`{path}` is not JSON: {error}. Name it .jsonl if each line is a row."
            ) from None
    if not isinstance(rows, list):
        raise UsageError(f"`{path}` holds a {type(rows).__name__}. It must hold a list of rows.")
    return rows


def _place(text: str, path: Path, at: At) -> str:
    """Say which row of a JSON file cannot be read."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    number, position = 0, text.find("[") + 1
    while True:
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n,"))
        try:
            _, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return f"`{path}`"
        except (ValueError, RecursionError):
            return at(number)
        number += 1


def decoded(raw: bytes, path: Path, line: int = 1) -> str:
    """Decode UTF-8, without a byte order mark; `line` is the number of the first line in `raw`."""
    if line == 1 and raw[:2] in _OTHER_FORMATS:
        what, fix = _OTHER_FORMATS[raw[:2]]
        raise UsageError(f"`{path}`, line 1: the file {what}, not UTF-8. {fix}")
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        number = line + raw.count(b"\n", 0, error.start)
        raise UsageError(
            f"`{path}`, line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}). If the file is "
            "Latin-1, convert it: `iconv -f LATIN1 -t UTF-8`."
        ) from None
