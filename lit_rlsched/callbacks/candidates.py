"""Schedules to choose from: each callback of ours alone, and those that work together."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import yaml

from lit_rlsched.callbacks.ahead_rollout import AheadRollout
from lit_rlsched.callbacks.down_sampling import DownSampling
from lit_rlsched.callbacks.drain_filling import DrainFilling
from lit_rlsched.callbacks.in_flight_updates import InFlightUpdates
from lit_rlsched.callbacks.infinite_sampling import LengthPrediction, MicroGroupSampling
from lit_rlsched.callbacks.sorted_batching import SortedBatching
from lit_rlsched.callbacks.streamed_training import StreamedTraining
from lit_rlsched.callbacks.tail_batching import TailBatching
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.pipeline import Outcome, unsupported
from lit_rlsched.training.schedule import RunFacts, Schedule

Option = tuple[type[Any], dict[str, Any]]
"""A callback's class and its arguments."""

PLAIN = "no callback"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Callbacks that work together, and the schedule that they make."""

    options: tuple[Option, ...]
    schedule: Schedule = field(compare=False)

    @property
    def name(self) -> str:
        """The callbacks as they are written in Python."""
        return " + ".join(map(written, self.options)) or PLAIN

    @property
    def beside_update(self) -> bool:
        """Whether it needs an engine in a process of its own."""
        return bool(self.schedule.beside_update)

    def callbacks(self) -> list[Any]:
        """Make the callbacks."""
        return [make(**arguments) for make, arguments in self.options]

    def overlay(self, engine: str | None = None, slots: int | None = None) -> str:
        """Return a configuration that adds it to a run."""
        if not self.options:
            return "# no callback is needed\n"
        options = self.options
        if slots is not None:
            more = dict(options).get(MicroGroupSampling, {})
            others = [option for option in options if option[0] is not MicroGroupSampling]
            options = ((MicroGroupSampling, {"slots": slots, **more}), *others)
        config: dict[str, Any] = {}
        if self.beside_update and engine is not None:
            inner = {"class_path": "ProcessEngine", "init_args": {"engine": engine}}
            config["data"] = {"engine": inner}
        given = [
            {"class_path": of.__name__, **({"init_args": arguments} if arguments else {})}
            for of, arguments in options
        ]
        config["trainer"] = {"callbacks+": given}
        return yaml.safe_dump(config, sort_keys=False)


def written(option: Option) -> str:
    """Return a callback as it is written in Python."""
    make, arguments = option
    return f"{make.__name__}({', '.join(f'{n}={v!r}' for n, v in arguments.items())})"


def options(num_generations: int, turns: int | None = None) -> list[Option]:
    """Return the callbacks that schedules are made of, at settings that have paid somewhere."""
    found: list[Option] = [
        (LengthPrediction, {}),
        (SortedBatching, {"mode": "partial"}),
        (SortedBatching, {"mode": "verified"}),
        (SortedBatching, {"mode": "on_policy"}),
        (TailBatching, {}),
        (TailBatching, {"reuse_drafts": True}),
        (TailBatching, {"prompt_ratio": 1.5, "max_deferrals": 8}),
        (DrainFilling, {}),
        (AheadRollout, {"correction": "verify"}),
        (AheadRollout, {"correction": "importance"}),
        (InFlightUpdates, {} if turns is None else {"turns": turns}),
        (StreamedTraining, {}),
    ]
    if num_generations > 2:
        found.append((DownSampling, {"keep": max(2, num_generations // 2)}))
    return found


ALTERNATIVES = frozenset({"MicroGroupSampling", *(of.__name__ for of, _ in options(3))})
"""Callbacks that a candidate takes the place of; a run keeps its others beside it."""


def candidate(chosen: Sequence[Option], facts: RunFacts) -> Candidate | None:
    """Return the candidate of some callbacks; `None` if they do not go together."""
    if len({make for make, _ in chosen}) < len(chosen):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = make_schedule([make(**arguments) for make, arguments in chosen], facts)
            schedule.slots.resolved_order(schedule.lengths is not None, schedule.rule.ends_early)
    except UsageError:
        return None
    return None if unsupported(schedule) else Candidate(tuple(chosen), schedule)


BIASED = 0.02
"""Deviation of trained from drawn length from which on a schedule counts as biased."""
CONSTRAINTS = ("on_policy", "unbiased")


def wanted_of(constraints: Sequence[str]) -> dict[str, float]:
    """Return constraints as `breaks` takes them."""
    for name in constraints:
        if name not in CONSTRAINTS:
            raise UsageError(f"The constraint {name!r} is none of {', '.join(CONSTRAINTS)}.")
    return dict.fromkeys(constraints, 1.0)


def breaks(schedule: Schedule, outcome: Outcome, wanted: Mapping[str, float]) -> bool:
    """Whether a simulated schedule breaks one of the constraints."""
    biased = schedule.selection is not None or abs(outcome.length_bias - 1) > BIASED
    return (
        ("on_policy" in wanted and outcome.stale_share > 0)
        or ("unbiased" in wanted and biased)
        or outcome.peak_kv > wanted.get("memory", math.inf)
    )


def candidates(facts: RunFacts, most: int = 2, turns: int | None = None) -> Iterator[Candidate]:
    """Yield combinations of at most `most` callbacks that the run allows, the plain one first."""
    every = options(facts.settings.num_generations, turns)
    for number in range(most + 1):
        for chosen in combinations(every, number):
            if (found := candidate(chosen, facts)) is not None:
                yield found
