"""Rows in memory-mapped Arrow, with their uids; a row is made when it is asked for."""

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from numpy.typing import NDArray

from lit_rlsched.data.messages import columns_of, normalized, prompt_of
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
        found = place < len(self._order) and at(place) == uid
        return int(self._order[place]) if found else None


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
    """Memory-map the file of a key, after one process of the machine has written it."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        key = None
    if key is None or not os.access(cache, os.W_OK):
        with TemporaryDirectory(prefix="lit_rlsched-") as folder:
            return _written(Path(folder, "rows.arrow"), batches())  # the mapping outlives its name
    path = cache / f"{key}.arrow"
    with FileLock(f"{path}.lock"):
        return _map(path) if path.exists() else _written(path, batches())


def digest(*parts: object) -> str:
    """Hash of what decides a file's content, for its key."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def _written(path: Path, batches: Iterator[pa.RecordBatch]) -> pa.Table:
    unfinished = path.with_suffix(".unfinished")
    try:
        first = next(batches)
        with pa.ipc.new_stream(str(unfinished), first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)
    return _map(path)


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


class RowTable:
    """Rows (a list, a `datasets.Dataset`, or JSON in a column of the table) with their uids."""

    def __init__(self, table: pa.Table, key: str | None, rows: Any = None) -> None:
        self._table = table
        self.key = key
        self._rows = rows

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, at: int) -> Row:
        if self._rows is None:
            return normalized(json.loads(self._table["row"][int(at)].as_py()))
        return normalized(self._rows[int(at)])

    def __iter__(self) -> Iterator[Row]:
        rows = self._rows
        if rows is None:
            rows = (json.loads(text.as_py()) for text in self._table["row"])
        elif not isinstance(rows, list | tuple):  # by column: a fifth of the time
            rows = (
                dict(zip(batch, values, strict=True))
                for batch in rows.iter(BATCH)
                for values in zip(*batch.values(), strict=True)
            )
        return map(normalized, rows)

    @cached_property
    def uids(self) -> pa.StringArray:
        """The column `uid`, or a hash of all columns."""
        return self._table["uid"].combine_chunks()

    @cached_property
    def _forms(self) -> list[tuple[bool, tuple[str, ...], int, int]]:
        """Chat or not, columns, first row and number of rows, of each form that rows have."""
        names, forms = self._table["form"], []
        for form, count in zip(*names.value_counts().flatten(), strict=True):
            chat, columns = json.loads(form.as_py())
            forms.append((chat, tuple(columns), pc.index(names, form).as_py(), count.as_py()))
        return forms

    @property
    def column_sets(self) -> dict[tuple[str, ...], int]:
        """Sets of columns that rows have, with the number of the first such row."""
        sets: dict[tuple[str, ...], int] = {}
        for _, columns, number, _ in self._forms:
            sets.setdefault(columns, number)
        return sets

    @property
    def odd_prompts(self) -> tuple[str, int, int] | None:
        """If some prompts are text and others chats: the rarer kind, its number, its first row."""
        counts = Counter({False: 0, True: 0})
        for chat, _, _, count in self._forms:
            counts[chat] += count
        _, (rarer, number) = counts.most_common()
        first = min((row for chat, _, row, _ in self._forms if chat == rarer), default=0)
        return ("chat messages" if rarer else "text", number, first) if number else None

    def unique(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keep the first of equal rows."""
        codes, numbers = self.uids.dictionary_encode().indices.to_numpy(), np.arange(len(self))
        first = np.unique(codes, return_index=True)[1][codes]  # for each row, that equals it
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
        uids, found = self.uids.to_pylist(), Counter[str]()
        for number, (uid, given) in enumerate(zip(uids, self._table["given"], strict=True)):
            if found[uid] and not given.as_py():
                uids[number] += f"-{found[uid]}"
            found[uid] += 1
        place = self._table.schema.get_field_index("uid")
        table = self._table.set_column(place, "uid", pa.array(uids, pa.string()))
        return RowTable(table, self.key, self._rows)


def record_batch(rows: Sequence[Row], first: int, texts: Sequence[str] = ()) -> pa.RecordBatch:
    """Make a batch of a table: uid, whether it was given, form, and JSON if there is some."""
    columns = {
        "uid": pa.array([row_uid(row, i) for i, row in enumerate(rows, first)], pa.string()),
        "given": pa.array([row.get("uid") is not None for row in rows], pa.bool_()),
        "form": pa.array([_form(type(prompt_of(row)) is not str, columns_of(row)) for row in rows]),
    }
    return pa.record_batch(columns | ({"row": pa.array(texts, pa.large_string())} if texts else {}))


@lru_cache
def _form(chat: bool, columns: tuple[Any, ...]) -> str:
    return json.dumps([chat, [*map(str, columns)]])


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
