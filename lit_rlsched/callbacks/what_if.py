"""Simulations of each schedule on the lengths and costs of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lit_rlsched.callbacks.candidates import PLAIN, Candidate, breaks, candidate, candidates
from lit_rlsched.callbacks.micro_group_sampling import MicroGroupSampling
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.run.saving.traces import described
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import Costs, calibrated
from lit_rlsched.simulation.peers import PEERS
from lit_rlsched.simulation.pipeline import Machine, Outcome, Pipeline
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.training.schedule import RunFacts, Schedule

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
        """Simulate our callbacks and the combinations that go together."""
        found = candidates(facts, most_callbacks, self.about["slots"], self._turns(facts))
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
    """Leave out the number of slots, which is the same in every simulation of a run."""
    plain = {"memory_budget": None, "refill": "continuous", "order": None}
    found = []
    for of in callbacks:
        arguments = of["init_args"]
        if of["class_path"] == MicroGroupSampling.__name__:
            arguments = {name: value for name, value in arguments.items() if name != "slots"}
            if arguments == plain:
                continue
        found.append({**of, "init_args": arguments})
    return found


def beside(facts: RunFacts) -> RunFacts:
    """Return facts about the same run whose engine decodes beside the update."""
    settings = replace(facts.settings, engine=ProcessEngine(TransformersEngine()))
    return replace(facts, settings=settings, callbacks=frozenset())


def what_if(
    traces: Traces,
    facts: RunFacts,
    most: int = 1,
    rounds: int = 8,
    slowdown: float | None = None,
) -> list[Simulated]:
    """Simulate our callbacks, alone and combined, on the lengths and costs of a run.

    Args:
        traces: Its traces.
        facts: Facts about it.
        most: Callbacks of a combination.
        rounds: Rounds that count.
        slowdown: See `Machine`.

    Returns:
        The simulations; none if the run has too little to learn costs from.
    """
    setting = setting_of(traces, rounds, slowdown)
    return [] if setting is None else setting.ours(beside(facts), most)


def setting_of(traces: Traces, rounds: int, slowdown: float | None = None) -> Setting | None:
    """Return the lengths and costs of a run; `None` if its engine has a virtual clock."""
    about = about_of(traces)
    if not traces.table("steps").num_rows or "slots" not in about:
        return None
    machine = Machine(about["slots"], about["engines"], slowdown)
    return Setting(about, Workload.of_run(traces), calibrated(traces), machine, rounds)


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
