"""Simulations of each schedule on the lengths and costs of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from lit_rlsched.callbacks.candidates import (
    ALTERNATIVES,
    PLAIN,
    Candidate,
    breaks,
    candidate,
    candidates,
)
from lit_rlsched.callbacks.infinite_sampling import MicroGroupSampling
from lit_rlsched.run.facts import EngineFacts
from lit_rlsched.run.saving.traces import FACTS, described
from lit_rlsched.scheduling.trace_files import Newest, Tables, Traces
from lit_rlsched.simulation.costs import Costs, calibrated
from lit_rlsched.simulation.peers import PEERS
from lit_rlsched.simulation.pipeline import Machine, Outcome, Pipeline
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.text import three_digits
from lit_rlsched.training.schedule import RunFacts, Schedule

ROUNDS = 8
"""Newest rounds of a run that a report simulates."""
WARM_UP = 4
"""Rounds that do not count: the first of a pool, and those until enough prompts are in flight."""
ENOUGH = 1.02
"""A schedule of fewer callbacks is recommended if it takes at most this many times as long."""
SHOWN = 20
"""Schedules in a table: the fastest, and every callback alone."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule and its simulation."""

    name: str
    schedule: Schedule
    outcome: Outcome
    of: Candidate | None = None
    """`None`: a peer's."""

    def refused(self, wanted: Mapping[str, float]) -> bool:
        """Whether it breaks one of the constraints."""
        return breaks(self.schedule, self.outcome, wanted)


@dataclass(frozen=True, slots=True)
class Setting:
    """What schedules are simulated on."""

    about: Mapping[str, Any]
    """Sizes, as in the traces of a run."""
    work: Workload
    costs: Costs
    machine: Machine
    rounds: int

    def pipeline(self, schedule: Schedule, exact_lengths: bool = False) -> Pipeline:
        """Return what simulates a schedule, which perhaps knows lengths in advance."""
        about, machine = self.about, self.machine
        if exact_lengths:
            machine = replace(machine, rank_correlation=1.0)
        shape = about["num_generations"], about["steps_per_round"], about["num_iterations"]
        return Pipeline(schedule, self.work, self.costs, machine, *shape)

    def _outcome(self, schedule: Schedule, exact_lengths: bool = False) -> Outcome:
        return self.pipeline(schedule, exact_lengths).run(self.rounds, WARM_UP)

    def ours(self, facts: RunFacts, most_callbacks: int) -> list[Simulated]:
        """Simulate our callbacks and the combinations that `fit` allows for the run."""
        facts = beside(facts)
        found = candidates(facts, most_callbacks, self._turns(facts))
        return [Simulated(c.name, c.schedule, self._outcome(c.schedule), c) for c in found]

    def _turns(self, facts: RunFacts) -> int | None:
        """Return the decode steps of an optimizer step: then its weights are there to go in.

        `None` if one of them takes no time.
        """
        plain = candidate((), facts)
        if plain is None:
            return None
        outcome = self._outcome(plain.schedule)
        updates = self.about["steps_per_round"] * self.about["num_iterations"]
        step = outcome.total("decoding") / max(1.0, outcome.total("decode_steps"))
        update = outcome.total("update") / len(outcome.rounds) / updates
        return max(1, round(update / step)) if update and step else None

    def peers(self) -> list[Simulated]:
        """Simulate the rules of other packages."""
        rows = []
        for peer in PEERS.values():
            schedule = peer.schedule(self.about["prompts_per_round"])
            outcome = self._outcome(schedule, peer.exact_lengths)
            rows.append(Simulated(peer.name, schedule, outcome))
        return rows


def about_of(traces: Traces) -> dict[str, Any]:
    """Return the settings of a run, with the slots and the callbacks of its rounds."""
    rounds = traces.rows("rounds")
    slots = [row["slots"] for row in rounds]
    known = {name: value for name, value in traces.about.items() if value is not None}
    if any(slots):
        known["slots"] = int(median(slots))
    given = rounds[-1].get("switches") if rounds else None
    return {**known, "callbacks": [json.loads(each)["class_path"] for each in given or ()]}


def own_schedule(traces: Traces, rows: Sequence[Simulated]) -> Simulated | None:
    """Return the simulation of the run's own callbacks, if it is among these."""
    last = traces.rows("rounds")[-1]
    own = _without_slots([json.loads(each) for each in last.get("switches") or ()])

    def same(row: Simulated) -> bool:
        if row.of is None:
            return False
        made = _without_slots([described(each) for each in row.of.callbacks()])
        return len(made) == len(own) and all(of in own for of in made)

    return next(filter(same, rows), None)


def _without_slots(callbacks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the number of slots, and callbacks that every schedule of the run has."""
    plain = {"memory_budget": None, "refill": "continuous", "order": None}
    found = []
    for of in callbacks:
        arguments = of["init_args"]
        if of["class_path"] not in ALTERNATIVES:
            continue
        if of["class_path"] == MicroGroupSampling.__name__:
            arguments = {name: value for name, value in arguments.items() if name != "slots"}
            if arguments == plain:
                continue
        found.append({**of, "init_args": arguments})
    return found


def beside(facts: RunFacts) -> RunFacts:
    """Return facts about the same run without the callbacks that decide its schedule.

    Its engine decodes beside the update: the configuration of a schedule that needs it says so.
    """
    engine: Any = replace(EngineFacts.of(facts.settings.engine), decodes_by_itself=True)
    settings = replace(facts.settings, engine=engine)
    return replace(facts, settings=settings, callbacks=facts.callbacks - ALTERNATIVES)


def missing(about: Mapping[str, Any]) -> list[str]:
    """Say what of a run its simulations leave out, and what its traces do not tell."""
    known, said = about.get(FACTS), []
    if known is None:
        said.append(
            "These traces are of an earlier version, which did not write whether a run has tools, "
            "nor most settings of its module: `fit` may refuse some of these schedules for it."
        )
    elif known["tools"]:
        said.append(
            "Simulated without tools: `fit` also waits for them and reads their replies, which "
            "takes longer."
        )
    if others := [name for name in about["callbacks"] if name not in ALTERNATIVES]:
        named = ", ".join(f"`{name}`" for name in others)
        said.append(f"Simulated without the run's {named}.")
    return said


def measured(traces: Tables) -> float | None:
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


def what_if(
    traces: Traces,
    facts: RunFacts,
    most: int = 1,
    rounds: int = ROUNDS,
    slowdown: float | None = None,
) -> list[Simulated]:
    """Simulate our callbacks, alone and combined, on the lengths and costs of a run."""
    setting = setting_of(traces, rounds, slowdown)
    return [] if setting is None else setting.ours(facts, most)


def setting_of(traces: Traces, rounds: int, slowdown: float | None = None) -> Setting | None:
    """Return lengths and costs of a run's newest rounds; `None` if its clock is virtual.

    There are as many of these rounds as are simulated, with their prompts in another order.
    """
    about = about_of(traces)
    if not traces.table("steps").num_rows or "slots" not in about:
        return None
    machine, newest = Machine(about["slots"], about["engines"], slowdown), Newest(traces, rounds)
    work = Workload.of_run(newest).shuffled(0)
    return Setting(about, work, calibrated(newest), machine, rounds)


def plain_of(rows: Sequence[Simulated]) -> Outcome | None:
    """Return the outcome without a callback, if the run allows that."""
    return next((row.outcome for row in rows if row.name == PLAIN), None)


def recommended(rows: Sequence[Simulated], wanted: Mapping[str, float]) -> Simulated | None:
    """Return the fastest schedule that keeps to the constraints; of equals, the simplest."""
    allowed = [row for row in rows if not row.refused(wanted)]
    if not allowed:
        return None
    least = min(row.outcome.seconds for row in allowed)

    def simple(row: Simulated) -> tuple[int, float]:
        return (len(row.of.options) if row.of else 0), row.outcome.seconds

    return min((r for r in allowed if r.outcome.seconds <= ENOUGH * least), key=simple)


def first(rows: Sequence[Simulated], best: Simulated | None = None) -> list[Simulated]:
    """Return the rows of a table, the fastest first, with the recommended one."""
    ordered = sorted(rows, key=lambda row: row.outcome.seconds)
    alone = {row.name for row in rows if row.of is not None and len(row.of.options) < 2}
    pairs = [row.name for row in ordered if row.name not in alone]
    kept = alone | {*pairs[: max(0, SHOWN - len(alone))]}
    if best is not None:
        kept.add(best.name)
    return [row for row in ordered if row.name in kept]
