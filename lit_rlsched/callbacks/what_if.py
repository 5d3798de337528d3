"""What other schedules would have done: those that a run allows, on its lengths and costs."""

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from statistics import median
from typing import Any

import yaml
from tqdm import tqdm

from lit_rlsched.callbacks.down_sampling import DownSampling
from lit_rlsched.callbacks.dynamic_sampling import DynamicSampling
from lit_rlsched.callbacks.infinite_sampling import LengthPrediction, MicroGroupSampling
from lit_rlsched.callbacks.prompt_choice import PromptBudget, PromptChoice
from lit_rlsched.callbacks.rollout_window import AsyncRollout, RolloutWindow
from lit_rlsched.callbacks.rollpacker import StreamedTraining, TailBatching
from lit_rlsched.callbacks.sorted_batching import SortedBatching
from lit_rlsched.run.saving.traces import FACTS, described
from lit_rlsched.run.switches import EngineFacts, make_schedule
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.costs import Costs, calibrated
from lit_rlsched.simulation.peers import PEERS
from lit_rlsched.simulation.pipeline import Machine, Outcome, Pipeline, unsupported
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.text import three_digits
from lit_rlsched.training.schedule import RunFacts, Schedule

Option = tuple[type[Any], dict[str, Any]]
"""A callback's class and its arguments."""

PLAIN = "no callback"
ROUNDS = 8
"""Newest rounds of a run that a report simulates."""
WARM_UP = 4
"""Rounds that do not count: the first of a pool, and those until enough prompts are in flight."""
ENOUGH = 1.02
"""A schedule of fewer callbacks is recommended if it takes at most this many times as long."""
SHOWN = 24
"""Schedules in a table: the fastest, and every callback alone."""
BIASED = 0.02
"""Deviation of trained from drawn length from which on a schedule counts as biased."""
CONSTRAINTS = ("on_policy", "unbiased")


def written(option: Option) -> str:
    """Return a callback as it is written in Python."""
    make, given = option
    return f"{make.__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Callbacks that work together, and the schedule that they make."""

    options: tuple[Option, ...]
    schedule: Schedule = field(compare=False)

    @property
    def name(self) -> str:
        """The callbacks as they are written in Python."""
        return " + ".join(map(written, self.options)) or PLAIN

    def callbacks(self) -> list[Any]:
        """Make the callbacks."""
        return [make(**arguments) for make, arguments in self.options]

    def overlay(self, engine: str | None = None, slots: int | None = None) -> str:
        """Return a configuration that adds it to a run.

        `engine` is given if it has no process of its own, `slots` if the run leaves them open.
        """
        if not self.options:
            return "# no callback is needed\n"
        options = dict(self.options)
        if slots is not None:
            more = options.pop(MicroGroupSampling, {})
            options = {MicroGroupSampling: {"slots": slots, **more}, **options}
        config: dict[str, Any] = {}
        if self.schedule.beside_update and engine is not None:
            inner = {"class_path": "ProcessEngine", "init_args": {"engine": engine}}
            config["data"] = {"engine": inner}
        given = [
            {"class_path": of.__name__, **({"init_args": arguments} if arguments else {})}
            for of, arguments in options.items()
        ]
        config["trainer"] = {"callbacks+": given}
        return yaml.safe_dump(config, sort_keys=False)


def options(num_generations: int) -> list[Option]:
    """Return the callbacks that schedules are made of, at settings that have paid somewhere."""
    found: list[Option] = [
        (LengthPrediction, {}),
        (SortedBatching, {"mode": "partial"}),
        (SortedBatching, {"mode": "on_policy"}),
        (TailBatching, {}),
        *((RolloutWindow, {"overtake": rounds}) for rounds in (0, 1, 2)),
        *(
            (AsyncRollout, {"max_staleness": age, "too_old": too_old})
            for age, too_old in product((1, 2, 3), ("verify", "wait"))
        ),
        (StreamedTraining, {}),
    ]
    if num_generations > 2:
        found.append((DownSampling, {"keep": max(2, num_generations // 2)}))
    return found


ALTERNATIVES = frozenset({"MicroGroupSampling", *(of.__name__ for of, _ in options(3))})
"""Callbacks that a candidate takes the place of; a run keeps its others beside it."""


def candidate(chosen: Sequence[Option], facts: RunFacts) -> Candidate:
    """Return the candidate of some callbacks; a `UsageError` says why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = make_schedule([make(**arguments) for make, arguments in chosen], facts)
    schedule.slots.resolved_order(schedule.lengths is not None, schedule.rule.ends_early)
    if why := unsupported(schedule):
        raise UsageError(why)
    return Candidate(tuple(chosen), schedule)


def candidates(facts: RunFacts, most: int = 2) -> Iterator[Candidate]:
    """Yield combinations of at most `most` callbacks that the run allows, the plain one first."""
    for number in range(most + 1):
        for chosen in combinations(options(facts.settings.num_generations), number):
            with suppress(UsageError):
                yield candidate(chosen, facts)


def left_out(facts: RunFacts) -> list[str]:
    """Name the callbacks that have no row, and say why."""
    found: dict[str, list[str]] = {}
    never: list[Option] = [
        (DynamicSampling, {}),
        (PromptChoice, {}),
        (PromptBudget, {"pilot": 2}),
        (DownSampling, {"keep": 2, "early_stop": True}),
        (TailBatching, {"per_domain": {"name": 1.0}}),
        (MicroGroupSampling, {"memory_budget": "1GiB"}),
    ]
    for option in [*options(facts.settings.num_generations), *never]:
        try:
            candidate([option], beside(facts))
        except UsageError as error:
            found.setdefault(str(error), []).append(written(option))
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule and its simulation."""

    name: str
    schedule: Schedule
    outcome: Outcome
    of: Candidate | None = None
    """`None`: a peer's."""

    def refused(self, wanted: Mapping[str, float]) -> bool:
        """Whether it breaks one of the constraints: `CONSTRAINTS`, or the tokens of `memory`."""
        outcome = self.outcome
        biased = self.schedule.selection is not None or abs(outcome.length_bias - 1) > BIASED
        return (
            ("on_policy" in wanted and outcome.stale_share > 0)
            or ("unbiased" in wanted and biased)
            or outcome.peak_kv > wanted.get("memory", math.inf)
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What schedules are simulated on."""

    about: Mapping[str, Any]
    """Sizes, as in the traces of a run."""
    work: Workload
    costs: Costs
    machine: Machine
    rounds: int

    def outcome(self, schedule: Schedule, keeps_cache: bool = False) -> Outcome:
        """Simulate a schedule; see `Pipeline`."""
        about, given = self.about, (schedule, self.work, self.costs, self.machine)
        shape = about["num_generations"], about["steps_per_round"], about["num_iterations"]
        return Pipeline(*given, *shape, keeps_cache=keeps_cache).run(self.rounds, WARM_UP)

    def ours(self, facts: RunFacts, most_callbacks: int) -> list[Simulated]:
        """Simulate our callbacks and the combinations that `fit` allows for the run."""
        found = tqdm(  # in a terminal, where it takes a while
            candidates(beside(facts), most_callbacks), "simulating", leave=False, disable=None
        )
        return [Simulated(c.name, c.schedule, self.outcome(c.schedule), c) for c in found]

    def peers(self) -> list[Simulated]:
        """Simulate the rules of other packages."""
        size = self.about["prompts_per_round"]
        made = ((peer, peer.schedule(size)) for peer in PEERS.values())
        return [Simulated(p.name, of, self.outcome(of, p.keeps_cache)) for p, of in made]


def setting_of(traces: Traces, rounds: int) -> Setting | None:
    """Return lengths and costs of a run's newest rounds; `None` if its clock is virtual."""
    about = about_of(traces)
    if not traces.table("steps").num_rows or "slots" not in about:
        return None
    machine, newest = Machine(about["slots"], about["engines"]), traces.newest(rounds)
    return Setting(about, Workload.of_run(newest).shuffled(0), calibrated(newest), machine, rounds)


def about_of(traces: Traces) -> dict[str, Any]:
    """Return the settings of a run, with the slots and the callbacks of its rounds."""
    rounds = traces.rows("rounds")
    slots = [row["slots"] for row in rounds]
    known = {name: value for name, value in traces.about.items() if value is not None}
    if any(slots):
        known["slots"] = int(median(slots))
    given = rounds[-1].get("switches") if rounds else None
    return {**known, "callbacks": [json.loads(each)["class_path"] for each in given or ()]}


def beside(facts: RunFacts) -> RunFacts:
    """Return facts of the run without its schedule, with an engine beside the update."""
    engine = facts.settings.engine
    able: Any = EngineFacts(engine.name, engine.logprobs, decodes_by_itself=True)
    settings = replace(facts.settings, engine=able)
    return replace(facts, settings=settings, callbacks=facts.callbacks - ALTERNATIVES)


def own_schedule(traces: Traces, rows: Sequence[Simulated]) -> Simulated | None:
    """Return the simulation of the run's own callbacks, if it is among these.

    The number of slots does not count, nor do callbacks that every schedule of the run has.
    """
    plain = {"memory_budget": None, "refill": "continuous", "order": None}
    too_old = "verify" if any("'verify'" in row.name for row in rows) else "wait"

    def compared(callbacks: Iterable[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for of in callbacks:
            name, arguments = of["class_path"], dict(of["init_args"])
            if name == MicroGroupSampling.__name__:
                arguments.pop("slots", None)
            if name == AsyncRollout.__name__:
                arguments["too_old"] = arguments["too_old"] or too_old
            if name in ALTERNATIVES and (name, arguments) != (MicroGroupSampling.__name__, plain):
                found.append((name, arguments))
        return sorted(found, key=str)

    own = compared(map(json.loads, traces.rows("rounds")[-1].get("switches") or ()))
    same = (row for row in rows if row.of and compared(map(described, row.of.callbacks())) == own)
    return next(same, None)


def missing(setting: Setting) -> list[str]:
    """Say what of a run its simulations leave out."""
    said, about = [], setting.about
    if about.get(FACTS, {}).get("tools") and not setting.work.calls_tools:
        said.append("Simulated without tools: `fit` also waits for them and reads their replies.")
    if others := [name for name in about["callbacks"] if name not in ALTERNATIVES]:
        named = ", ".join(f"`{name}`" for name in others)
        said.append(f"Simulated without the run's {named}.")
    return said


def measured(traces: Traces) -> float | None:
    """Return the median seconds from a round to the next; `None` with less than two rounds."""
    clocks = [row["clock"] for row in traces.rows("rounds")]
    took = [after - before for before, after in pairwise(clocks)]
    return median(took) if took else None


def named(row: Simulated, own: Simulated | None, seconds: float | None) -> str:
    """Return the name of a schedule; that of the run with the seconds that a round has taken."""
    if row is not own:
        return row.name
    took = "" if seconds is None else f": {three_digits(seconds)} s measured"
    return f"{row.name}  (this run{took})"


def recommended(rows: Sequence[Simulated], wanted: Mapping[str, float]) -> Simulated | None:
    """Return the fastest schedule that keeps to the constraints; of equals, the simplest."""
    allowed = [row for row in rows if not row.refused(wanted)]
    if not allowed:
        return None
    least = min(row.outcome.seconds for row in allowed)
    fast = [row for row in allowed if row.outcome.seconds <= ENOUGH * least]
    return min(fast, key=lambda row: (len(row.of.options) if row.of else 0, row.outcome.seconds))


def first(rows: Sequence[Simulated], best: Simulated | None = None) -> list[Simulated]:
    """Return the rows of a table, the fastest first, with the recommended one."""
    ordered = sorted(rows, key=lambda row: row.outcome.seconds)
    alone = {row.name for row in rows if row.of is not None and len(row.of.options) < 2}
    pairs = [row.name for row in ordered if row.name not in alone]
    kept = alone | {*pairs[: max(0, SHOWN - len(alone))], *([best.name] if best else ())}
    return [row for row in ordered if row.name in kept]
