"""What libraries raise while data are read, as errors that name the data, row and column."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_rlsched.settings import UsageError

_OTHER_FORMATS = {
    b"\x1f\x8b": ("is compressed with gzip", "Unpack it: `gunzip`."),
    b"\xff\xfe": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    b"\xfe\xff": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
}
At = Callable[[int], str]
"""Says where the row with a number is."""


@contextmanager
def located(at: Callable[[], str]) -> Iterator[None]:
    """Let what a library raises in the block say where the data are."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise unreadable(at(), error) from error


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


def unreadable(at: str, error: Exception) -> UsageError:
    """Return the error of data that a library cannot read; `at` says where they are."""
    why = f"{error!s:.300}".strip().rstrip(".")
    if isinstance(error, RecursionError):
        why = "lists or dicts are nested too deeply"
    return UsageError(
        f"{at} cannot be read ({type(error).__name__}: {why}). Repair it or leave it out; a file "
        "may have been cut short."
    )


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


def of_batch(batch: pa.RecordBatch, at: At, first: int) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python values."""
    try:
        return batch.to_pylist()
    except Exception:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = ({name: value} for value in column)
            for_each(lambda one, _: [value.as_py() for value in one.values()], values, at, first)
        raise


def json_of(text: str) -> Any:
    """Read JSON, and refuse an object that has a key twice, as one of its values would be lost."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key `{twice}` twice")
    return found


def read_json(path: Path, at: At) -> list[Any]:
    """Read a file that holds a list of rows."""
    text = decoded(path.read_bytes(), path)
    try:
        rows = json_of(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"`{path}` is not JSON: {error}. Name it .jsonl if each line is a row."
        ) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(_place(text, path, at), error) from error
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
