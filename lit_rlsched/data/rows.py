"""Rows of prompts, read from files, folders, data sets and tasks; errors name the row."""

import glob
import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

from lit_rlsched.data.messages import NO_PROMPT, check_row, normalized, prompt_of
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


class RowTable:
    """Rows (a list or a `datasets.Dataset`) with their uids."""

    def __init__(self, rows: Any, checked: Iterable[Row]) -> None:
        self._rows = rows
        self.uids: list[str] = []
        """The column `uid` of each row, or a hash of all its columns."""
        self.column_sets: dict[tuple[str, ...], int] = {}
        """Sets of columns that rows have, with the number of the first such row."""
        self._given = set[int]()
        kinds, first = Counter({"chat messages": 0, "text": 0}), dict[str, int]()
        for number, row in enumerate(checked):
            self.uids.append(row_uid(row, number))
            columns = (str(n) for n in row if n != "prompt" or row[n] != NO_PROMPT)
            self.column_sets.setdefault(tuple(columns), number)
            kind = "text" if type(prompt_of(row)) is str else "chat messages"
            kinds[kind] += 1
            first.setdefault(kind, number)
            if row.get("uid") is not None:
                self._given.add(number)
        rarer, odd = min(kinds.items(), key=lambda of: of[1])
        self.odd_prompts = (rarer, odd, first[rarer]) if odd else None
        """If some prompts are text and others chats: the rarer kind, its number, its first row."""

    def __len__(self) -> int:
        return len(self.uids)

    def __getitem__(self, at: int) -> Row:
        return normalized(self._rows[int(at)])

    def __iter__(self) -> Iterator[Row]:
        rows = self._rows if isinstance(self._rows, list) else _in_batches(self._rows)
        return map(normalized, rows)

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
    name = "rows" if isinstance(spec, list | tuple) else name_of(spec)
    try:
        with located(f"`{name}`"):
            table = _load(spec)
            if not table:
                raise UsageError(f"The data set `{name}` is empty.")
    except UsageError as error:
        if name in str(error):
            raise
        raise UsageError(f"`{name}`: {error}") from error
    if has_objects:
        table.tell_apart()
        return table
    for columns, number in table.column_sets.items():
        if "prompt" not in columns:
            raise UsageError(
                f"{_at(name_of(spec), number)} has no column `prompt`, or an empty one; its "
                f"columns are {sorted(columns)}. Rename the one that holds the prompt."
            )
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
        stream = islice(spec.with_format(None), MOST_STREAMED + 1)
        rows = [*each(stream, type(spec).__name__)]
        if len(rows) > MOST_STREAMED:
            raise UsageError(
                f"The stream has more than {MOST_STREAMED:,} rows, and it is read to its end "
                "before the run begins. Give as many as the run needs: `stream.take(100_000)`."
            )
        return _of_list(rows, type(spec).__name__)
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
        import datasets

        if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            raise UsageError(
                f"`{path}` is a folder, but not one that `datasets.save_to_disk` wrote. "
                "Give the path of a file in it."
            )
        return _of_dataset(_one_split(datasets.load_from_disk(str(path)), str(path)), spec)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise UsageError(f"There is no file `{path}` to read prompts from.")
        if path.suffix == ".parquet":
            return _read_parquet(path, spec)
        if path.suffix == ".jsonl":
            rows = [*_read_lines(path)]
            return RowTable(rows, rows)
        try:
            rows = json.loads(decoded(path.read_bytes(), path), object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"`{path}` is not JSON: {error}. Name it .jsonl if each line is a row."
            ) from None
        if not isinstance(rows, list):
            kind = type(rows).__name__
            raise UsageError(f"`{path}` holds a {kind}. It must hold a list of rows.")
        return _of_list(rows, spec)
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
    form = data.format
    if form["type"] == "custom":  # a transform, which may give other values each time
        return _of_list([*each(data, name)], name)
    if not form["output_all_columns"] and {*form["columns"]} != {*data.column_names}:
        data = data.select_columns(form["columns"])
    data = data.with_format(None)
    data.data.validate(full=True)  # values outside a damaged file would end the process
    rows = (check_row(row, _at(name, i)) for i, row in enumerate(_in_batches(data)))
    return RowTable(data, each(rows, name))


def _of_list(rows: Sequence[Any], name: str) -> RowTable:
    def checked() -> Iterator[Row]:
        for number, given in enumerate(rows):
            row = check_row(given, _at(name, number))
            json.dumps(row) if is_json(row) else pickle.dumps(row)  # rewards, checkpoints get it
            yield row

    table = [*each(checked(), name)]
    return RowTable(table, table)


def is_json(value: Any) -> bool:
    """Return whether JSON gives back the same value, of the same type."""
    kind = type(value)
    if kind is list:
        return all(map(is_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_json, value.values()))
    return kind in (str, int, float, bool, type(None))


def _read_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if line := decoded(raw, path, number).strip():
                at = f"`{path}`, line {number}"
                with located(at):
                    try:
                        row = check_row(json.loads(line, object_pairs_hook=_unique), at)
                    except json.JSONDecodeError as error:
                        raise UsageError(f"{at} is not JSON: {error}.") from None
                yield row


def _read_parquet(path: Path, name: str) -> RowTable:
    import pyarrow.parquet
    from datasets import Dataset

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(
                f"`{path}` has two columns `{twice[0]}`. Rename or remove one of them."
            )
        if not file.metadata.num_rows:  # `datasets` refuses such a file
            return RowTable([], [])
    return _of_dataset(Dataset.from_parquet(glob.escape(str(path))), name)


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


def _at(name: str, number: int) -> str:
    return f"`{name}`, row {number} (the first is 0)"


@contextmanager
def located(at: str) -> Iterator[None]:
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
            f"{at} cannot be read ({type(error).__name__}: {why}). Repair it or leave it out; a "
            "file may have been cut short."
        ) from error


def each(rows: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield rows: an error names the row behind those that were yielded."""
    iterator = iter(rows)
    for number in count():
        with located(_at(name, number)):
            try:
                row = next(iterator)
            except StopIteration:
                return
        yield row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object of JSON that has a key twice, as one of its values would be lost."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key `{twice}` twice")
    return found


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
