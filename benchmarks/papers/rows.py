"""Rows of the table: the settings of each run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "runs/smollm2"
LENGTHS = Path(__file__).with_name("lengths.csv")
"""Lengths of the model's own completions; see `record`."""


def callbacks(*wanted: str | tuple[str, dict[str, Any]]) -> Callable[[], list[Any]]:
    """Return a function that makes callbacks, given as names or as names with arguments."""

    def make() -> list[Any]:
        from lit_rlsched import callbacks as ours

        pairs = [(each, {}) if isinstance(each, str) else each for each in wanted]
        return [getattr(ours, name)(**arguments) for name, arguments in pairs]

    return make


def slots(number: int, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Return `MicroGroupSampling` with this number of slots."""
    return "MicroGroupSampling", {"slots": number, **arguments}


@dataclass(frozen=True)
class Row:
    """A run: rounds of prompts under one schedule."""

    callbacks: Callable[[], list[Any]]
    threads: int = 2
    """Threads of the trainer, and of the engine where it is in the same process."""
    own_process: bool = False
    """Whether the engine has a process of its own, with one thread."""
    prompts: int = 4
    generations: int = 8
    limit: int = 512
    rounds: int = 3
    """Measured rounds; one more comes before them."""


def schedules(number: int) -> dict[str, Row]:
    """Return rows for the schedules with a number of slots."""
    here = slots(number)
    importance = ("AheadRollout", {"correction": "importance"})
    apart: dict[str, Any] = {"threads": 1, "own_process": True}
    return {
        f"{number} slots, in turn": Row(callbacks(slots(number, refill="rounds"))),
        f"{number} slots": Row(callbacks(here)),
        f"{number} slots, longest first": Row(
            callbacks(slots(number, order="longest_first"), "LengthPrediction")
        ),
        f"{number} slots, DrainFilling": Row(callbacks(here, "DrainFilling")),
        f"{number} slots, Speculation": Row(callbacks(here, "Speculation")),
        f"{number} slots, DownSampling": Row(callbacks(here, ("DownSampling", {"keep": 2}))),
        f"{number} slots, own process": Row(callbacks(here), **apart),
        f"{number} slots, AheadRollout, importance": Row(callbacks(here, importance), **apart),
        f"{number} slots, AheadRollout, verify": Row(callbacks(here, "AheadRollout"), **apart),
        f"{number} slots, InFlightUpdates": Row(callbacks(here, "InFlightUpdates"), **apart),
    }


ROWS: dict[str, Row] = {
    "all at once": Row(callbacks()),
    **schedules(8),
    **schedules(16),
}
