"""The real runs that are predicted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.rows import callbacks, slots

LIMIT = 64
SCALE = 16
"""Recorded lengths are divided by it, so that a rollout of the chat model takes 20 seconds."""
ROLLOUTS, UPDATES = "16 slots", "4 slots, updates"
"""Runs that costs are fitted to."""


@dataclass(frozen=True)
class Row:
    """A run. Engine and trainer have a process and a core each."""

    callbacks: Callable[[], list[Any]]
    slots: int
    calibration: str = ROLLOUTS
    engines: int = 1
    trains: bool = False
    """Whether rewards differ, so that updates have something to compute."""
    prompts: int = 8
    generations: int = 8
    rounds: int = 3
    """The first warms up."""


def rollouts(number: int, *more: Any, **settings: Any) -> Row:
    """Return a row of 64 completions a round, whose updates have nothing to compute."""
    return Row(callbacks(slots(number), *more), number, **settings)


def updates(*more: Any) -> Row:
    """Return a row of 16 completions a round, with updates."""
    here = slots(4)
    return Row(callbacks(here, *more), 4, UPDATES, trains=True, prompts=2)


ROWS: dict[str, Row] = {
    ROLLOUTS: rollouts(16),
    "8 slots": rollouts(8),
    "64 slots": rollouts(64),
    "two engines, 16 slots": rollouts(16, engines=2),
    "SortedBatching, partial": rollouts(16, ("SortedBatching", {"mode": "partial"})),
    "SortedBatching, on_policy": rollouts(16, ("SortedBatching", {"mode": "on_policy"})),
    "TailBatching": rollouts(16, "TailBatching"),
    "RolloutWindow": rollouts(16, "RolloutWindow"),
    UPDATES: updates(),
    "DownSampling": updates(("DownSampling", {"keep": 4})),
    "AsyncRollout": updates("AsyncRollout"),
}
