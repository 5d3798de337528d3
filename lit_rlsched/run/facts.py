"""Facts about a run: of its Trainer, and as JSON in its traces, to check other schedules later."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning import Trainer

from lit_rlsched.environments.protocol import Environments
from lit_rlsched.run.fsdp2 import is_sharded
from lit_rlsched.run.switches import class_names
from lit_rlsched.settings import plain
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.schedule import RunFacts, RunSettings, ToolSettings
from lit_rlsched.types import Sampling


def facts_of_trainer(
    trainer: Trainer, settings: RunSettings, learner: Learner, trains: bool
) -> RunFacts:
    """Return what callbacks may know of a run when they set the schedule."""
    module: Any = trainer.lightning_module
    return RunFacts(
        settings,
        learner,
        class_names(trainer.callbacks),  # type: ignore[attr-defined]
        trains,
        module.hparams,
        module.automatic_optimization,
        trainer.world_size,
        type(trainer.strategy).__name__ if is_sharded(trainer) else None,
    )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Stands in for an engine where a schedule is only checked; for the fields see its class."""

    name: str
    logprobs: bool
    decodes_by_itself: bool

    @classmethod
    def of(cls, engine: Any) -> "EngineFacts":
        """Return the facts about an engine."""
        return cls(**{field.name: getattr(engine, field.name) for field in fields(cls)})


class RecordedLearner(PlainLearner):
    """Answers as the module of a run did; it trains nothing."""

    def __init__(self, needs_group: bool, obstacle: str | None, engine_logprobs: bool) -> None:
        self.needs_group = needs_group
        self._obstacle, self._engine_logprobs = obstacle, engine_logprobs

    def streaming_obstacle(self) -> str | None:
        return self._obstacle

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        return self._engine_logprobs


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
        "engine": asdict(EngineFacts.of(settings.engine)),
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
