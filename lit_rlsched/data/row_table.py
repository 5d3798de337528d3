"""Rows in memory-mapped Arrow, with their uids; a row is made when it is asked for."""

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from numpy.typing import NDArray

from lit_rlsched.data.messages import PROMPT_COLUMNS, columns_of, normalized, prompt_of
from lit_rlsched.settings import UsageError
from lit_rlsched.types import stable_hash


class UidIndex:
    """Finds the position of a uid, with 8 bytes of memory for each."""

    def __init__(self, uids: pa.StringArray) -> None:
        self._uids = uids
        self._order: NDArray[np.uint64] = pc.sort_indices(uids).to_numpy()
        self._find = lru_cache(1 << 16)(self._search)

    def __getitem__(self, uid: str) -> int:
        if (position := self._find(uid)) is None:
            raise KeyError(uid)
        return position

    def __contains__(self, uid: str) -> bool:
        return self._find(uid) is not None

    def _search(self, uid: str) -> int | None:
        def at(place: int) -> str:
            return self._uids[int(self._order[place])].as_py()

        place = bisect_left(range(len(self._order)), uid, key=at)
        if place == len(self._order) or at(place) != uid:
            return None
        return int(self._order[place])


def fingerprint(uids: pa.StringArray) -> str:
    """Number of uids, and `stable_hash` of them in their order."""
    content, separator = hashlib.blake2b(digest_size=8), ""
    for start in range(0, len(uids), 1000):
        content.update((separator + "\x1f".join(uids.slice(start, 1000).to_pylist())).encode())
        separator = "\x1f"
    return f"{len(uids)} prompts, {int.from_bytes(content.digest(), 'big') >> 1:016x}"


BATCH = 1000
"""Rows of a record batch."""


def cache_folder() -> Path:
    """Folder of the files, in the cache of `datasets`: `HF_DATASETS_CACHE` or `HF_HOME` move it."""
    from huggingface_hub.constants import HF_HOME

    root = os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")
    return Path(root, "lit_rlsched")


def mapped(key: str | None, batches: Callable[[], Iterator[pa.RecordBatch]]) -> pa.Table:
    """Memory-map the file of a key, after writing it if there is none.

    One process writes; the others of the machine wait for it and map the same file.
    """
    if key is None or not _writable(cache_folder()):
        with TemporaryDirectory(prefix="lit_rlsched-") as folder:
            path = Path(folder, "rows.arrow")
            _write(path, batches())
            return _map(path)  # the mapping outlives the name of the file
    path = cache_folder() / f"{key}.arrow"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            try:
                _write(unfinished, batches())
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            unfinished.replace(path)
    return _map(path)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def digest(*parts: object) -> str:
    """Hash of what decides a file's content, for its key."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def _write(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    writer = None
    with path.open("wb") as file:
        for batch in batches:
            if writer is None:
                writer = pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
        assert writer is not None, "no rows"
        writer.close()


def _map(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_stream(file).read_all()
    except (OSError, pa.ArrowException) as error:
        raise UsageError(
            f"`{path}`, which keeps rows or tokens that were read before, is damaged ({error}). "
            "Delete it: it is then made again."
        ) from error


Row = dict[str, Any]


class RowTable(Sequence[Row]):
    """Rows of a data set."""

    def __init__(
        self, table: pa.Table, key: str | None, objects: Sequence[Row] | None = None
    ) -> None:
        self._table = table
        self.key = key
        self._objects = objects

    def __len__(self) -> int:
        return self._table.num_rows

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if self._objects is not None:
            return self._objects[at]
        return _decoded(self._table["row"][int(at)].as_py())

    def __iter__(self) -> Iterator[Row]:
        if self._objects is not None:
            yield from self._objects
            return
        for start in range(0, len(self), BATCH):
            yield from map(_decoded, self._table["row"].slice(start, BATCH).to_pylist())

    def prompts(self, start: int, stop: int) -> list[Row]:
        """The columns of some rows that decide the tokens of their prompts."""
        if self._objects is not None:
            return [*self._objects[start:stop]]
        rows = self._table["row"].slice(start, stop - start)
        if not pa.types.is_struct(rows.type):
            return [*map(_decoded, rows.to_pylist())]
        names = [name for name in PROMPT_COLUMNS if rows.type.get_field_index(name) >= 0]
        if not names:
            return [{}] * len(rows)
        columns = [pc.struct_field(rows, name).to_pylist() for name in names]
        return [
            normalized(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)
        ]

    @cached_property
    def uids(self) -> pa.StringArray:
        """The column `uid`, or a hash of all columns."""
        return self._table["uid"].combine_chunks()

    @cached_property
    def _forms(self) -> list[tuple[bool, tuple[str, ...], int, int]]:
        """Chat or not, columns, first row and number of rows, of each form that rows have."""
        names = self._table["names"].combine_chunks()
        numbers, counts = np.unique(_first(names), return_counts=True)
        forms = []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            chat, columns = json.loads(names[number].as_py())
            forms.append((chat, tuple(columns), number, count))
        return forms

    @property
    def column_sets(self) -> dict[tuple[str, ...], int]:
        """Sets of columns that rows have, with the number of the first such row."""
        sets: dict[tuple[str, ...], int] = {}
        for _, columns, number, _ in self._forms:
            sets.setdefault(columns, number)
        return sets

    @property
    def has_chats(self) -> bool:
        """Whether a prompt is a chat."""
        return any(chat for chat, *_ in self._forms)

    @property
    def odd_prompts(self) -> tuple[str, int, int] | None:
        """If some prompts are text and others chats: the rarer kind, its number, its first row."""
        counts = Counter({False: 0, True: 0})
        for chat, _, _, count in self._forms:
            counts[chat] += count
        (_, _), (rarer, number) = counts.most_common()
        if not number:
            return None
        first = min(row for chat, _, row, _ in self._forms if chat == rarer)
        return "chat messages" if rarer else "text", number, first

    def unique(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keep the first of equal rows."""
        first, numbers = _first(self.uids), np.arange(len(self))
        repeated = np.flatnonzero(first != numbers)
        given = self._table["given"].to_numpy()
        if (wrong := repeated[given[repeated] | given[first[repeated]]]).size:
            number = int(wrong[0])
            raise UsageError(
                f"Rows {first[number]} and {number} have the same `uid` "
                f"{self.uids[number].as_py()!r}. A uid names one prompt: make them different, or "
                "leave the column out."
            )
        return np.flatnonzero(first == numbers), repeated

    def told_apart(self) -> "RowTable":
        """Return the table with another uid for each of equal rows: its own, `UID-1`, `UID-2`..."""
        first = _first(self.uids)
        repeated = first != np.arange(len(self))
        repeated &= ~self._table["given"].to_numpy()
        uids, found = self.uids.to_pylist() if repeated.any() else [], Counter[int]()
        for number in np.flatnonzero(repeated).tolist():
            found[first[number]] += 1
            uids[number] += f"-{found[first[number]]}"
        if not uids:
            return self
        place = self._table.schema.get_field_index("uid")
        table = self._table.set_column(place, "uid", pa.array(uids, pa.string()))
        return RowTable(table, self.key, self._objects)


def _decoded(row: Any) -> Row:
    return normalized(json.loads(row) if isinstance(row, str) else row)


def _first(values: pa.StringArray) -> NDArray[np.int64]:
    """For each value, the position of the first one that equals it."""
    codes = values.dictionary_encode().indices.to_numpy()
    _, first = np.unique(codes, return_index=True)
    return first[codes]


def record_batch(
    rows: Sequence[Row], first: int, stored: Iterable[str] | pa.StructArray
) -> pa.RecordBatch:
    """Make a batch of a table."""
    uids, given, names = [], [], []
    named: dict[tuple[bool, tuple[str, ...]], str] = {}
    for number, row in enumerate(rows, start=first):
        uids.append(row_uid(row, number))
        given.append(row.get("uid") is not None)
        form = not isinstance(prompt_of(row), str), columns_of(row)
        if form not in named:
            named[form] = json.dumps([form[0], [str(name) for name in form[1]]])
        names.append(named[form])
    return pa.RecordBatch.from_arrays(
        [
            pa.array(uids, pa.string()),
            pa.array(given, pa.bool_()),
            pa.array(names, pa.string()),
            stored if isinstance(stored, pa.StructArray) else pa.array(stored, pa.large_string()),
        ],
        names=["uid", "given", "names", "row"],
    )


def other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that reward functions get, besides prompt and uid."""
    return {name: value for name, value in row.items() if name not in ("prompt", "uid")}


def row_uid(row: Mapping[str, Any], number: int) -> str:
    """Return the column `uid`, or a hash of all columns.

    One prompt with two answers is two prompts, and a row's uid does not depend on other rows.
    """
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
    pass


def _plain(value: Any) -> str:
    text = repr(value)
    if " at 0x" in text:  # its address
        raise _LooksDifferent(type(value).__name__)
    return text


_ENCODER = json.JSONEncoder(sort_keys=True, default=_plain)  # `json.dumps` would make one a row
