"""The real runs that are predicted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.rows import callbacks, slots

PROMPTS, GENERATIONS, LIMIT = 8, 8, 128
"""Shape of a round: 64 completions."""
SCALE = 8
"""Recorded lengths are divided by it, so that a round of the chat model takes half a minute."""
ROUNDS = 4
"""Rounds of a run; the first warms up."""


@dataclass(frozen=True)
class Row:
    """A run. Engine and trainer have a process and a core each."""

    callbacks: Callable[[], list[Any]]
    slots: int = 16
    engines: int = 1
    trains: bool = False
    """Whether rewards differ, so that updates have something to compute."""


def row(number: int, *more: Any, **settings: Any) -> Row:
    """Return a row with a number of slots and other callbacks."""
    return Row(callbacks(slots(number), *more), number, **settings)


CALIBRATION = "16 slots"
ROWS: dict[str, Row] = {
    CALIBRATION: row(16, trains=True),
    "8 slots": row(8),
    "64 slots": row(64),
    "two engines, 16 slots": row(16, engines=2),
    "SortedBatching, partial": row(16, ("SortedBatching", {"mode": "partial"})),
    "SortedBatching, on_policy": row(16, ("SortedBatching", {"mode": "on_policy"})),
    "TailBatching": row(16, "TailBatching"),
    "DrainFilling": row(16, "DrainFilling"),
    "least attained": Row(callbacks(slots(16, order="least_attained")), 16),
    "DownSampling": row(16, ("DownSampling", {"keep": 4}), trains=True),
    "AheadRollout, importance": row(
        16, ("AheadRollout", {"correction": "importance"}), trains=True
    ),
    "AheadRollout, verify": row(16, "AheadRollout", trains=True),
}
