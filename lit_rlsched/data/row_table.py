"""Rows with their uids; those of a data set are made when they are asked for."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lit_rlsched.data.messages import columns_of, normalized, prompt_of
from lit_rlsched.settings import UsageError
from lit_rlsched.types import stable_hash

BATCH = 1000
"""Rows that are read from a `datasets.Dataset` at once."""

Row = dict[str, Any]


class RowTable:
    """Rows (a list or a `datasets.Dataset`) with their uids."""

    def __init__(self, rows: Any, checked: Iterable[Row]) -> None:
        self._rows = rows
        self.uids: list[str] = []
        """The column `uid` of each row, or a hash of all its columns."""
        self.column_sets: dict[tuple[str, ...], int] = {}
        """Sets of columns that rows have, with the number of the first such row."""
        self._given = set[int]()
        self._kinds: dict[str, list[int]] = {"chat messages": [], "text": []}
        for number, row in enumerate(checked):
            self.uids.append(row_uid(row, number))
            self.column_sets.setdefault(tuple(map(str, columns_of(row))), number)
            self._kinds["text" if type(prompt_of(row)) is str else "chat messages"].append(number)
            if row.get("uid") is not None:
                self._given.add(number)

    def __len__(self) -> int:
        return len(self.uids)

    def __getitem__(self, at: int) -> Row:
        return normalized(self._rows[int(at)])

    def __iter__(self) -> Iterator[Row]:
        rows = self._rows
        if not isinstance(rows, list):  # by column: a fifth of the time
            rows = (
                dict(zip(batch, values, strict=True))
                for batch in rows.iter(BATCH)
                for values in zip(*batch.values(), strict=True)
            )
        return map(normalized, rows)

    @property
    def odd_prompts(self) -> tuple[str, int, int] | None:
        """If some prompts are text and others chats: the rarer kind, its number, its first row."""
        kind, numbers = min(self._kinds.items(), key=lambda of: len(of[1]))
        return (kind, len(numbers), numbers[0]) if numbers else None

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
