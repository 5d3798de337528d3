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
    steps: int = 1
    """Optimizer steps of a round."""
    rounds: int = 3
    """Measured rounds."""
    warm_up: int = 1
    """Rounds before them."""
    after: int = 0
    """Rounds after them: nothing is drawn beside the last update of a run."""


def schedules(number: int) -> dict[str, Row]:
    """Return rows for the schedules with a number of slots.

    Where the engine has its own process, the second round alone is measured, which is long.
    """
    here = slots(number)
    importance = ("AheadRollout", {"correction": "importance"})
    apart: dict[str, Any] = {"threads": 1, "own_process": True, "rounds": 1, "after": 1}
    return {
        f"{number} slots, in turn": Row(callbacks(slots(number, refill="rounds"))),
        f"{number} slots": Row(callbacks(here)),
        f"{number} slots, longest first": Row(
            callbacks(slots(number, order="longest_first"), "LengthPrediction")
        ),
        f"{number} slots, least attained": Row(callbacks(slots(number, order="least_attained"))),
        f"{number} slots, DrainFilling": Row(callbacks(here, "DrainFilling")),
        f"{number} slots, Speculation": Row(callbacks(here, "Speculation")),
        f"{number} slots, DownSampling": Row(callbacks(here, ("DownSampling", {"keep": 2}))),
        f"{number} slots, second round": Row(callbacks(here), rounds=1),
        f"{number} slots, own process": Row(callbacks(here), **{**apart, "after": 0}),
        f"{number} slots, AheadRollout, importance": Row(callbacks(here, importance), **apart),
        f"{number} slots, AheadRollout, verify": Row(callbacks(here, "AheadRollout"), **apart),
        f"{number} slots, InFlightUpdates": Row(callbacks(here, "InFlightUpdates"), **apart),
    }


def groups_of(generations: int, number: int = 8) -> dict[str, Row]:
    """Return rows for Infinite Sampling: as many completions in larger groups."""
    shape: dict[str, Any] = {"prompts": 32 // generations, "generations": generations}
    longest = slots(number, order="longest_first")
    name = f"groups of {generations}"
    return {
        f"{name}, all at once": Row(callbacks(), **shape),
        f"{name}, in turn": Row(callbacks(slots(number, refill="rounds")), **shape),
        f"{name}, continuous": Row(callbacks(slots(number)), **shape),
        f"{name}, longest first": Row(callbacks(longest, "LengthPrediction"), **shape),
    }


def pools(number: int) -> dict[str, Row]:
    """Return rows for SortedRL and RollPacker: whole pools, after one of each."""
    here = slots(number)
    four: dict[str, Any] = {"rounds": 4, "warm_up": 4}
    cycle: dict[str, Any] = {"rounds": 5, "warm_up": 5}
    name = f"{number} slots"
    modes = ("on_policy", "partial", "verified")
    return {
        f"{name}, four steps a round": Row(callbacks(here), prompts=16, steps=4, rounds=1),
        **{
            f"{name}, SortedBatching, {mode}": Row(
                callbacks(here, ("SortedBatching", {"mode": mode})), **four
            )
            for mode in modes
        },
        f"{name}, TailBatching": Row(callbacks(here, "TailBatching"), **cycle),
        f"{name}, TailBatching, drafts": Row(
            callbacks(here, ("TailBatching", {"reuse_drafts": True})), **cycle
        ),
    }


ROWS: dict[str, Row] = {
    "all at once": Row(callbacks()),
    **schedules(8),
    **schedules(16),
    **groups_of(16),
    **pools(16),
}
