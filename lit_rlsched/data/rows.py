"""Rows of prompts, read from files, folders, data sets and tasks; errors name the row."""

import glob
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lit_rlsched.data.messages import (
    check_prompt,
    check_row,
    columns_of,
    normalized,
    prompt_of,
)
from lit_rlsched.data.tasks import HubDataset, PromptTask
from lit_rlsched.settings import UsageError
from lit_rlsched.types import stable_hash

# Not `dict[str, Any]`: jsonargparse (4.53) would turn the answer "2" of a row in a config into 2.
Rows = PromptTask | list[dict] | str | Path  # type: ignore[type-arg]
"""A file (.jsonl, .json, .parquet), a folder saved by `datasets.save_to_disk`, a hub data set
(`name` or `name:split`), rows, a `datasets.Dataset`, or a task that makes rows."""

Row = dict[str, Any]

BATCH = 1000
"""Rows that are read from a `datasets.Dataset` at once."""
_OTHER_FORMATS = {
    b"\x1f\x8b": ("is compressed with gzip", "Unpack it: `gunzip`."),
    b"\xff\xfe": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    b"\xfe\xff": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
}
MOST_STREAMED = 1_000_000
"""Rows of a `datasets.IterableDataset`, which may have no end."""
At = Callable[[int], str]
"""Says where the row with a number is."""


class RowTable:
    """Rows (a list or a `datasets.Dataset`) with their uids."""

    def __init__(self, rows: Any, checked: Iterable[Row]) -> None:
        self._rows = rows
        self.uids: list[str] = []
        """The column `uid` of each row, or a hash of all its columns."""
        self.column_sets: dict[tuple[str, ...], int] = {}
        """Sets of columns that rows have, with the number of the first such row."""
        self._given = set[int]()
        self._kinds = Counter({"chat messages": 0, "text": 0})
        self._first: dict[str, int] = {}  # row of each kind
        for number, row in enumerate(checked):
            self.uids.append(row_uid(row, number))
            self.column_sets.setdefault(tuple(map(str, columns_of(row))), number)
            kind = "text" if type(prompt_of(row)) is str else "chat messages"
            self._kinds[kind] += 1
            self._first.setdefault(kind, number)
            if row.get("uid") is not None:
                self._given.add(number)

    def __len__(self) -> int:
        return len(self.uids)

    def __getitem__(self, at: int) -> Row:
        return normalized(self._rows[int(at)])

    def __iter__(self) -> Iterator[Row]:
        rows = self._rows if isinstance(self._rows, list) else _in_batches(self._rows)
        return map(normalized, rows)

    @property
    def odd_prompts(self) -> tuple[str, int, int] | None:
        """If some prompts are text and others chats: the rarer kind, its number, its first row."""
        kind, number = min(self._kinds.items(), key=lambda of: of[1])
        return (kind, number, self._first[kind]) if number else None

    def unique(self) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that equal no earlier row, and of those that do."""
        first: dict[str, int] = {}
        repeated = []
        for number, uid in enumerate(self.uids):
            earlier = first.setdefault(uid, number)
            if earlier == number:
                continue
            if self._given & {earlier, number}:
                raise UsageError(
                    f"Rows {earlier} and {number} have the same `uid` {uid!r}. A uid names one "
                    "prompt: make them different, or leave the column out."
                )
            repeated.append(number)
        return [*first.values()], repeated

    def tell_apart(self) -> None:
        """Give each of equal rows another uid: its own, `UID-1`, `UID-2`..."""
        found = Counter[str]()
        for number, uid in enumerate(self.uids):
            if found[uid] and number not in self._given:
                self.uids[number] += f"-{found[uid]}"
            found[uid] += 1


def load_rows(spec: Rows | Any, has_objects: bool = False) -> RowTable:
    """Read rows that have a `prompt`, optionally a `uid`, and columns for the reward functions.

    Rows of a `datasets.Dataset` or a Parquet file stay in the files of `datasets`, others are held
    in memory. Rows have plain Python values, whatever the data set's format, and normalized
    messages.
    """
    with naming("rows" if isinstance(spec, list | tuple) else name_of(spec)):
        table = _load(spec)
    if has_objects:
        table.tell_apart()
        return table
    for columns, number in table.column_sets.items():
        check_prompt(columns, _at(name_of(spec), number))
    return table


def _load(spec: Rows | Any) -> RowTable:
    if isinstance(spec, str | Path):
        return _read(str(spec))
    if isinstance(spec, list | tuple):
        return _of_list(spec, "rows")
    spec = _one_split(spec, type(spec).__name__)
    if isinstance(spec, HubDataset):
        return _of_dataset(spec.dataset(), type(spec).__name__)
    if isinstance(spec, PromptTask):
        return _of_list(spec.rows(), type(spec).__name__)
    if type(spec).__name__ == "IterableDataset":
        return _of_stream(spec, type(spec).__name__)
    if hasattr(spec, "with_format") and hasattr(spec, "to_list"):
        return _of_dataset(spec, type(spec).__name__)
    raise UsageError(
        f"Cannot read prompts from a {type(spec).__name__}. Use a path to a .jsonl, .json or "
        ".parquet file, a folder of `datasets.save_to_disk`, a hub name, a `datasets.Dataset`, "
        "a list of dicts, or a task such as `Countdown`."
    )


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
            return _of_list(_read_json(path), spec)
        if path.suffix == ".jsonl":
            return _in_memory([*_read_lines(path)], str(path))
        return _of_dataset(_open_parquet(path), spec)
    if path.exists() or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        problem = "has a format that cannot be read" if path.exists() else "does not exist"
        raise UsageError(
            f"`{spec}` {problem}. Use a .jsonl, .json or .parquet file, a folder of "
            "`datasets.save_to_disk`, or the name of a data set on the Hugging Face hub."
        )
    name, _, split = spec.partition(":")
    return _of_dataset(HubDataset(name, split=split or "train").dataset(), spec)


def _in_batches(data: Any) -> Iterator[Row]:
    """Yield the rows of a data set, much faster than one at a time."""
    for start in range(0, len(data), BATCH):
        try:
            columns = data[start : start + BATCH]
        except Exception:  # one row is damaged; the caller names the one that raises
            yield from map(data.__getitem__, range(start, min(start + BATCH, len(data))))
            continue
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def _of_dataset(data: Any, name: str) -> RowTable:
    at = partial(_at, name)
    _check_some(len(data), name)
    form = data.format
    if form["type"] == "custom":  # a transform, which may give other values each time
        return _of_list([*each(data, at)], name)
    if not form["output_all_columns"] and {*form["columns"]} != {*data.column_names}:
        data = data.select_columns(form["columns"])
    data = data.with_format(None)
    data.data.validate(full=True)  # values outside a damaged file would end the process
    rows = (check_row(row, i, at) for i, row in enumerate(_in_batches(data)))
    return RowTable(data, each(rows, at))


def _of_stream(stream: Any, name: str) -> RowTable:
    rows = [*each(islice(stream.with_format(None), MOST_STREAMED + 1), partial(_at, name))]
    if len(rows) > MOST_STREAMED:
        raise UsageError(
            f"The stream has more than {MOST_STREAMED:,} rows, and it is read to its end before "
            "the run begins. Give as many as the run needs: `stream.take(100_000)`."
        )
    return _of_list(rows, name)


def _of_list(rows: Sequence[Any], name: str) -> RowTable:
    def checked(row: Any, number: int) -> Row:
        row = check_row(row, number, at)
        json.dumps(row) if is_json(row) else pickle.dumps(row)  # rewards and checkpoints get it
        return row

    at = partial(_at, name)
    return _in_memory([*each((checked(row, i) for i, row in enumerate(rows)), at)], name)


def _in_memory(rows: list[Row], name: str) -> RowTable:
    _check_some(len(rows), name)
    return RowTable(rows, rows)


def is_json(value: Any) -> bool:
    """Return whether JSON gives back the same value, of the same type."""
    kind = type(value)
    if kind is list:
        return all(map(is_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_json, value.values()))
    return kind in (str, int, float, bool, type(None))


def _read_lines(path: Path) -> Iterator[Row]:
    def at(number: int) -> str:
        return f"`{path}`, line {number}"

    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if line := decoded(raw, path, number).strip():
                with located(partial(at, number)):
                    try:
                        row = check_row(json_of(line), number, at)
                    except json.JSONDecodeError as error:
                        raise UsageError(f"{at(number)} is not JSON: {error}.") from None
                yield row


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet
    from datasets import Dataset

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(
                f"`{path}` has two columns `{twice[0]}`. Rename or remove one of them."
            )
        _check_some(file.metadata.num_rows, str(path))
    return Dataset.from_parquet(glob.escape(str(path)))


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
    """Yield rows: an error names the row behind those that were yielded."""
    iterator, number = iter(rows), 0
    while True:
        with located(partial(at, number)):
            try:
                row = next(iterator)
            except StopIteration:
                return
        yield row
        number += 1


def json_of(text: str) -> Any:
    """Read JSON, and refuse an object that has a key twice, as one of its values would be lost."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key `{twice}` twice")
    return found


def _read_json(path: Path) -> list[Any]:
    """Read a file that holds a list of rows."""
    try:
        rows = json_of(decoded(path.read_bytes(), path))
    except json.JSONDecodeError as error:
        raise UsageError(
            f"`{path}` is not JSON: {error}. Name it .jsonl if each line is a row."
        ) from None
    if not isinstance(rows, list):
        raise UsageError(f"`{path}` holds a {type(rows).__name__}. It must hold a list of rows.")
    return rows


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


def other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that reward functions get, besides prompt and uid."""
    return {name: value for name, value in row.items() if name not in ("prompt", "uid")}


def row_uid(row: Mapping[str, Any], number: int) -> str:
    """Return the column `uid`, or a hash of all columns, so that it depends on no other row."""
    if (given := row.get("uid")) is not None:
        try:
            return str(given).encode().decode()
        except ValueError as error:  # half of a surrogate pair, or too many digits
            raise UsageError(f"Row {number} has a `uid` that is no text ({error}).") from None
    columns = {str(name): value for name, value in row.items() if name != "uid"}
    try:
        return f"{stable_hash(_ENCODER.encode(columns)):016x}"
    except _LooksDifferent as error:
        raise UsageError(
            f"Row {number} has a {error} in its columns, which looks different in every run, so "
            "that no stable name can be made from the row. Add a column `uid`."
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"Row {number}: no stable name can be made from its columns ({error}). "
            "Add a column `uid`, or make every key of its dicts a string."
        ) from None


class _LooksDifferent(Exception):
    """A value's text has its address."""


def _plain(value: Any) -> str:
    if " at 0x" in (text := repr(value)):
        raise _LooksDifferent(type(value).__name__)
    return text


_ENCODER = json.JSONEncoder(sort_keys=True, default=_plain)  # `json.dumps` would make one a row
