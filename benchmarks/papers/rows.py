"""Rows of the table: the settings of each run."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "runs/smollm2"
LENGTHS = Path(__file__).with_name("lengths.csv")
"""Lengths of the model's own completions: 16 of each of 32 prompts, temperature 1."""


def recorded_lengths() -> dict[str, list[int]]:
    """Return the lengths of each prompt's completions, by its uid."""
    with LENGTHS.open() as file:
        return {uid: [*map(int, lengths)] for uid, *lengths in csv.reader(file)}


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
    scale: int = 1
    """What the recorded lengths are divided by, and the limit of 512 tokens."""
    rounds: int = 3
    """Measured rounds, at most."""
    warm_up: int = 1
    """Rounds before them."""
    reward: Callable[..., list[float]] = alike
    after: int = 0
    """Rounds after them: nothing is drawn beside the last update of a run."""
    pool: int = 1
    """Rounds of prompts that are drawn together; only whole pools are measured."""


SCHEDULES: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "RolloutWindow, streamed": ("RolloutWindow", "StreamedTraining"),
    "RolloutWindow(overtake=2), streamed": (("RolloutWindow", {"overtake": 2}), "StreamedTraining"),
    "SortedBatching, streamed": ("SortedBatching", "StreamedTraining"),
    "SortedBatching(partial), streamed": (
        ("SortedBatching", {"mode": "partial"}),
        "StreamedTraining",
    ),
    "TailBatching, streamed": ("TailBatching", "StreamedTraining"),
    "AsyncRollout": ("AsyncRollout",),
    "DownSampling(2)": (("DownSampling", {"keep": 2}),),
}
"""Callbacks of the papers' table."""


def shape(
    name: str, prompts: int, generations: int, *more: Any, rounds: int, scale: int = 1
) -> dict[str, Row]:
    """Return the rows of the papers' table for one shape of a round.

    Engine and trainer have a core each, and all rewards of a group differ. A window begins with
    nothing in flight, so two rounds are warm-up; with pools, the first pool is.
    """
    rows = {}
    waits = {"prompts_in_flight": 2 * prompts, "too_old": "wait"}
    every = SCHEDULES | {f"AsyncRollout({2 * prompts}, wait)": (("AsyncRollout", waits),)}
    for how, names in every.items():
        pool = {"SortedBatching": 4, "TailBatching": 5}.get(how.split("(")[0].split(",")[0], 1)
        rows[f"{name}, {how}"] = Row(
            callbacks(*more, *names),
            threads=1,
            own_process=True,
            prompts=prompts,
            generations=generations,
            scale=scale,
            rounds=2 * pool - 2 if pool > 1 else rounds,
            warm_up=2,
            after=1,
            pool=pool,
            reward=distinct,
        )
    return rows


def rollouts(number: int) -> dict[str, Row]:
    """Return rows for rollouts alone, with a number of slots."""
    made = {
        "in turn": callbacks(slots(number, refill="rounds")),
        "continuous": callbacks(slots(number)),
        "longest first": callbacks(slots(number, order="longest_first"), "LengthPrediction"),
    }
    return {f"rollout, {number} slots, {how}": Row(make) for how, make in made.items()}


SHAPES = {
    "few rows": shape("few rows", 2, 4, rounds=8),
    "32 on 16 slots": shape("32 on 16 slots", 4, 8, slots(16), rounds=2, scale=2),
}
ROWS: dict[str, Row] = {
    **SHAPES["few rows"],
    **SHAPES["32 on 16 slots"],
    "both cores, 32 on 16 slots": Row(callbacks(slots(16)), reward=distinct, scale=2),
    "rollout, all at once": Row(callbacks()),
    **rollouts(8),
    **rollouts(16),
}
