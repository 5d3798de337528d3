"""What the Trainer iterates over: sized, lazy, and never a `DataLoader`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.evaluation import Evaluated, evaluate, never_correct
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
from lit_rlsched.types import Prompt

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule


class Rounds:
    """One iteration is one round, one item one optimizer step.

    Sized, so that Lightning neither looks one item ahead nor draws before the epoch has begun.
    """

    def __init__(self, datamodule: "RolloutDataModule") -> None:
        self._datamodule = datamodule

    def __len__(self) -> int:
        return self._datamodule.steps_per_epoch

    def __iter__(self) -> Iterator[OptimizerStep]:
        yield from self._datamodule.run.optimizer_steps()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the data module holds the state. Its presence tells Lightning we can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class MicroBatches:
    """The same round for modules with automatic optimization: one item is one micro-batch.

    How many there are is known only once the round is drawn, so this one has no length; the
    callback `MicroBatchAccumulation` tells Lightning where each optimizer step ends, and
    `FitSettings` how many steps there are.
    """

    def __init__(self, datamodule: "RolloutDataModule") -> None:
        self._datamodule = datamodule

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in self._datamodule.run.optimizer_steps():
            yield from step

    def state_dict(self) -> dict[str, Any]:
        """Empty, as in `Rounds`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class Evaluation:
    """One item is one held-out prompt with its completions, in the order of the data.

    Args:
        datamodule: Draws them.
        stage: `val` or `test`: keeps the seeds of the two apart.
    """

    def __init__(self, datamodule: "RolloutDataModule", stage: str) -> None:
        self._datamodule = datamodule
        self._stage = stage

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def _prompts(self) -> list[Prompt]:
        data = self._datamodule
        if not data.is_tokenized(self._stage):
            data.started()  # where they are known, Lightning may ask after the end, too
        return data.startup.prompts.held_out[self._stage]

    def __iter__(self) -> Iterator[Evaluated]:
        """Answer each prompt; the seeds are the same at every evaluation."""
        data, stage = self._datamodule, self._stage
        assert data.trainer is not None
        session, version = data.started(), data.trainer.global_step
        yield from evaluate(
            self._prompts,
            data.evaluation,
            stage,
            lambda groups: session.rollout(groups, version, salt=stage),
            data.rewards.weights,
            self._look_at_accuracy,
        )

    def _look_at_accuracy(self, evaluated: Sequence[Evaluated]) -> None:
        """Say once where no answer could ever count as correct."""
        data = self._datamodule
        if data.trainer is not None and data.trainer.predicting:
            return
        said = never_correct(evaluated, data.rewards.names[0], data.evaluation.threshold)
        for text in data.run.advice.of_evaluation(said):
            rank_zero_warn(text)
