"""From a list of callbacks to the schedule of a run, without a Trainer, and with facts as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lit_rlsched.environments.protocol import Environments, ToolSettings
from lit_rlsched.run.combinations import ROUND_ENDS, check, warn
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.settings import UsageError, plain
from lit_rlsched.training.learner import PlainLearner
from lit_rlsched.training.schedule import RunFacts, RunSettings, Schedule, Switch
from lit_rlsched.types import Sampling


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


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Stands in for an engine where a schedule is only checked; for the fields see its class."""

    name: str
    logprobs: bool
    decodes_by_itself: bool


@dataclass(kw_only=True)
class RecordedLearner(PlainLearner):
    """Answers as the module of a run did; it trains nothing."""

    needs_group: bool
    obstacle: str | None
    engine_logprobs: bool

    def streaming_obstacle(self) -> str | None:
        return self.obstacle

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        return self.engine_logprobs


OF_THE_RUN = ("ranks", "sharded", "automatic", "prompts")
"""Facts that are numbers and names."""


def recorded(facts: RunFacts) -> dict[str, Any]:
    """Return all that `make_schedule` asks of a run, except the sizes of its rounds, as JSON."""
    settings, learner = facts.settings, facts.learner
    answers = {
        "needs_group": learner.needs_group,
        "obstacle": learner.streaming_obstacle(),
        "engine_logprobs": learner.needs_engine_logprobs(off_policy=False),
    }
    return {
        "tools": settings.tools is not None,
        "sampling": asdict(settings.sampling),
        "engine": {of.name: getattr(settings.engine, of.name) for of in fields(EngineFacts)},
        "learner": answers,
        "module": plain(facts.module),
        "callbacks": sorted(facts.callbacks),
        **{name: getattr(facts, name) for name in OF_THE_RUN},
    }


def facts_from(record: Mapping[str, Any], settings: RunSettings) -> RunFacts:
    """Return the facts that `recorded` has written."""
    limit = settings.sampling.max_completion_length
    sampling: Any = record["sampling"]
    engine: Any = EngineFacts(**record["engine"])
    settings = replace(
        settings,
        engine=engine,
        sampling=Sampling(**{**sampling, "max_completion_length": limit}),
        tools=ToolSettings(Environments()) if record["tools"] else None,
    )
    return RunFacts(
        settings,
        learner=RecordedLearner(**record["learner"]),
        callbacks=frozenset(record["callbacks"]),
        module=record["module"],
        **{name: record[name] for name in OF_THE_RUN},
    )
