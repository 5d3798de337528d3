"""From a list of callbacks to the schedule of a run, without a Trainer."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lit_rlsched.run.combinations import ROUND_ENDS, check, warn
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule, Switch


def class_names(callbacks: Iterable[object]) -> frozenset[str]:
    """Return the names of the classes of callbacks and of their base classes."""
    return frozenset(of.__name__ for callback in callbacks for of in type(callback).__mro__)


def switches_of(callbacks: Iterable[object]) -> list[Switch]:
    """Return the callbacks that set fields of the schedule."""
    return [c for c in callbacks if isinstance(c, Switch) and c.sets is not None]


def make_schedule(callbacks: Sequence[object], facts: RunFacts) -> Schedule:
    """Return the schedule that callbacks set; no Trainer is needed.

    Example::

        settings = RolloutDataModule(prompts, reward, prompts_per_round=8).run.settings
        rule = make_schedule([TailBatching()], RunFacts(settings)).rule
    """
    switches = switches_of(callbacks)
    for setting in dict.fromkeys(switch.sets for switch in switches):
        if len(alike := [c for c in switches if c.sets == setting]) > 1:
            names = " and ".join(f"`{type(c).__name__}`" for c in alike)
            raise UsageError(
                f"The Trainer has {len(alike)} callbacks that decide {setting}: {names}. Remove "
                "all but one. A configuration with `callbacks+:` adds to the callbacks of the "
                "earlier ones."
            )
    facts = replace(facts, callbacks=facts.callbacks | class_names(callbacks))
    schedule = Schedule(plain := FullRound(facts.settings.prompts_per_round))
    check(schedule, facts)  # pairs that cannot work together, before one trips over the other
    for switch in switches:
        before = schedule.rule
        switch.apply(schedule, facts)
        if schedule.rule is not before and before is not plain:
            who, other = type(switch).__name__, type(before).__name__
            raise UsageError(f"`{who}` with the rule `{other}`: {ROUND_ENDS}")
    check(schedule, facts)
    warn(schedule, facts)
    return schedule
