"""Rows of the table: the settings of each run."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MODEL = "runs/smollm2"
LENGTHS = Path(__file__).with_name("lengths.csv")
"""Lengths of the model's own completions: 16 of each of 32 prompts, temperature 1."""


def recorded_lengths() -> dict[str, list[int]]:
    """Return the lengths of each prompt's completions, by its uid."""
    with LENGTHS.open() as file:
        return {uid: [*map(int, lengths)] for uid, *lengths in csv.reader(file)}


def parity(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Return whether each completion has an odd number of tokens: the same for all schedules."""
    return [float(len(ids) % 2) for ids in completion_ids]


def distinct(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Return rewards that differ in every group, so that each update has all of its completions."""
    return [float(sum(ids) % 101) for ids in completion_ids]


def alike(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Return equal rewards: the update has nothing to compute."""
    return [0.0] * len(completion_ids)


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
    """Optimizer steps of a pass over a round."""
    passes: int = 1
    rounds: int = 3
    """Measured rounds."""
    warm_up: int = 1
    """Rounds before them."""
    precision: str = "32-true"
    """Of the trainer; the engine has that of its passes."""
    reward: Callable[..., list[float]] = parity
    after: int = 0
    """Rounds after them: nothing is drawn beside the last update of a run."""


def rounds(number: int, precision: str | None = None) -> dict[str, Row]:
    """Return rows for whole rounds with a number of slots.

    Where the engine has its own process, the second round alone is measured. What is drawn ahead
    beside its update are the completions of the third round, whose rollout alone is another row.
    """
    here = slots(number)
    apart: dict[str, Any] = {"threads": 1, "own_process": True, "rounds": 1, "after": 1}
    name = f"{number} slots"
    rows = {
        name: Row(callbacks(here)),
        f"{name}, longest first": Row(callbacks(*longest_first(number))),
        f"{name}, RolloutWindow, streamed": Row(
            callbacks(here, "RolloutWindow", "StreamedTraining"), **apart
        ),
        f"{name}, RolloutWindow(overtake=2), streamed": Row(
            callbacks(here, ("RolloutWindow", {"overtake": 2}), "StreamedTraining"), **apart
        ),
        f"{name}, DownSampling": Row(callbacks(here, ("DownSampling", {"keep": 2}))),
        f"{name}, second round": Row(callbacks(here), rounds=1),
        f"{name}, own process": Row(callbacks(here), **{**apart, "after": 0}),
        f"{name}, own process, third rollout": Row(
            callbacks(here), **{**apart, "after": 0, "warm_up": 2, "reward": alike}
        ),
        f"{name}, AsyncRollout": Row(callbacks(here, "AsyncRollout"), **apart),
    }
    if precision is None:
        return rows
    return {f"{n}, {precision}": replace(row, precision=precision) for n, row in rows.items()}


def longest_first(number: int) -> tuple[Any, ...]:
    """Return callbacks that begin with the completions that are expected to be longest."""
    return slots(number, order="longest_first"), "LengthPrediction"


def rollouts(number: int) -> dict[str, Row]:
    """Return rows for rollouts alone, with a number of slots."""
    here, name = slots(number), f"rollout, {number} slots"
    made = {
        "in turn": callbacks(slots(number, refill="rounds")),
        "continuous": callbacks(here),
        "longest first": callbacks(*longest_first(number)),
        "RolloutWindow": callbacks(here, "RolloutWindow"),
    }
    return {f"{name}, {how}": Row(make, reward=alike) for how, make in made.items()}


def few_rows() -> dict[str, Row]:
    """Return rows with few completions, where a CPU's decode step is flattest, as on a GPU.

    Engine and trainer have a core each. Windows begin with nothing in flight, so two rounds are
    warm-up.
    """
    shape: dict[str, Any] = {"prompts": 2, "generations": 4, "threads": 1, "own_process": True}
    shape |= {"warm_up": 2, "rounds": 12, "after": 1, "reward": distinct}
    four = {"prompts_in_flight": 8, "overtake": 2}
    made = {
        "plain": callbacks(),
        "RolloutWindow, streamed": callbacks("RolloutWindow", "StreamedTraining"),
        "RolloutWindow(8, overtake=2), streamed": callbacks(
            ("RolloutWindow", four), "StreamedTraining"
        ),
        "AsyncRollout": callbacks("AsyncRollout"),
        "AsyncRollout(4, wait)": callbacks(
            ("AsyncRollout", {"prompts_in_flight": 4, "too_old": "wait"})
        ),
    }
    rows = {f"few rows, {how}": Row(make, **shape) for how, make in made.items()}
    shape |= {"limit": 128, "passes": 2}  # the update is the longer part
    longer = ("plain", "AsyncRollout(4, wait)")
    return rows | {f"few rows, long update, {how}": Row(made[how], **shape) for how in longer}


def groups_of(generations: int, number: int = 8) -> dict[str, Row]:
    """Return rows for Infinite Sampling: as many completions in larger groups."""
    shape: dict[str, Any] = {"prompts": 32 // generations, "generations": generations}
    name = f"rollout, groups of {generations}"
    made = {
        "all at once": callbacks(),
        "in turn": callbacks(slots(number, refill="rounds")),
        "continuous": callbacks(slots(number)),
        "longest first": callbacks(*longest_first(number)),
    }
    return {f"{name}, {how}": Row(make, reward=alike, **shape) for how, make in made.items()}


def pools(number: int) -> dict[str, Row]:
    """Return rows for the rollouts of SortedRL and RollPacker: whole pools, after one of each."""
    here, name = slots(number), f"rollout, {number} slots"
    four: dict[str, Any] = {"rounds": 4, "warm_up": 4, "reward": alike}
    cycle: dict[str, Any] = {"rounds": 5, "warm_up": 5, "reward": alike}
    once: dict[str, Any] = {"prompts": 16, "steps": 4, "rounds": 1, "reward": alike}
    rows = {f"{name}, four steps a round": Row(callbacks(here), **once)}
    for mode in ("on_policy", "partial"):
        how = callbacks(here, ("SortedBatching", {"mode": mode}))
        rows[f"{name}, SortedBatching, {mode}"] = Row(how, **four)
    return rows | {f"{name}, TailBatching": Row(callbacks(here, "TailBatching"), **cycle)}


ROWS: dict[str, Row] = {
    **rounds(16),
    **rounds(16, "bf16-mixed"),
    "rollout, all at once": Row(callbacks(), reward=alike),
    **rollouts(8),
    **rollouts(16),
    **groups_of(16),
    **pools(16),
    **few_rows(),
}
