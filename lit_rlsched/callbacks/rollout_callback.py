"""A Lightning callback with rollout hooks."""

from typing import TYPE_CHECKING, ClassVar

from lightning import Callback, LightningModule, Trainer

from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.settings import RemembersInit, UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule
from lit_rlsched.types import Completion, Group

if TYPE_CHECKING:
    from lit_rlsched.training.round import Round


class RolloutCallback(RemembersInit, Callback):
    """Base class of callbacks with hooks for rounds; override what you need.

    Each hook fires exactly once per round, completion or group of training, even if the run is
    resumed. Held-out prompts fire only `on_evaluation_progress`. A callback that sets fields of the
    schedule does so in `apply`, and says in `sets` what it decides; two callbacks that decide the
    same are refused. Loggers get the arguments of those callbacks as part of the run's
    configuration.

    Example::

        class Longest(RolloutCallback):
            def on_round_end(self, trainer, pl_module, round):
                print(max(len(c.token_ids) for c in round.completions))
    """

    sets: ClassVar[str | None] = None

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set fields of the schedule, before the engine starts; `facts` are those of the run."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer whose data module has no schedule to set."""
        if self.sets is not None:
            run_of(trainer, self)

    def on_round_start(
        self, trainer: Trainer, pl_module: LightningModule, plan: list[Group]
    ) -> None:
        """Called before the groups in `plan` are drawn."""

    def on_completion_end(
        self, trainer: Trainer, pl_module: LightningModule, completion: Completion
    ) -> None:
        """Called for each scored completion; `SortedBatching` may still draw it again."""

    def on_group_end(self, trainer: Trainer, pl_module: LightningModule, group: Group) -> None:
        """Called when all completions of a prompt are scored."""

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: "Round") -> None:
        """Called when the round has its advantages, before it is trained on.

        The entries of `round.metrics`, to which this hook may add, are logged after it.
        """

    def on_evaluation_progress(
        self, trainer: Trainer, pl_module: LightningModule, done: int, total: int
    ) -> None:
        """Called while held-out prompts are answered, on the rank that draws.

        First with `done=0`, then each time a completion is scored.
        """


def find_run(trainer: Trainer) -> TrainingRun | None:
    """Return the run of the Trainer's `RolloutDataModule`, if it has one."""
    run = getattr(getattr(trainer, "datamodule", None), "run", None)
    return run if isinstance(run, TrainingRun) else None


def run_of(trainer: Trainer, callback: Callback) -> TrainingRun:
    """Return the run of the Trainer's `RolloutDataModule`."""
    if (run := find_run(trainer)) is None:
        kind = type(getattr(trainer, "datamodule", None)).__name__
        raise UsageError(
            f"`{type(callback).__name__}` needs rollouts, but the data module is a `{kind}`. "
            "Fit with `datamodule=RolloutDataModule(...)`, or remove the callback."
        )
    return run
