"""Loaders that the Trainer iterates over; each draws its rollouts when it is iterated."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.run.evaluation import Evaluated, check_scored, evaluate, never_correct
from lit_rlsched.run.interrupts import begin_validation
from lit_rlsched.run.trainer import fire
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
from lit_rlsched.training.rounds import Drawing

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule


class _Loader:
    def __init__(self, datamodule: "RolloutDataModule") -> None:
        self._datamodule = datamodule

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: Lightning resumes mid-epoch only if a loader has this method."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; the data module holds the state."""


class Rounds(_Loader):
    """Loader for manual optimization: one iteration is one round, one item one optimizer step.

    It has a length, so that Lightning does not prefetch an item and draw before the epoch begins.
    """

    def __len__(self) -> int:
        return self._datamodule.steps_per_epoch

    def __iter__(self) -> Iterator[OptimizerStep]:
        yield from self._datamodule.run.optimizer_steps()


class MicroBatches(_Loader):
    """Loader for automatic optimization: one iteration is one round, one item one micro-batch.

    It has no length, as the number of micro-batches is unknown until the round is drawn.
    `MicroBatchAccumulation` tells Lightning where each optimizer step ends, and `FitSettings` how
    many steps there are.
    """

    def __iter__(self) -> Iterator[MicroBatch]:
        assert self._datamodule.trainer is not None
        precision = self._datamodule.trainer.precision_plugin
        for step in self._datamodule.run.optimizer_steps():
            batches = iter(step)
            while True:
                with precision.tensor_init_context():  # of log-probs in `64-true`
                    batch = next(batches, None)
                if batch is None:
                    break
                yield batch


class Evaluation:
    """Loader of held-out prompts: one item is a prompt with its completions, in data order.

    Args:
        datamodule: The data module that draws them.
        stage: `val`, `test` or `predict`; each has its own seeds, the same at every evaluation.
    """

    def __init__(self, datamodule: "RolloutDataModule", stage: str) -> None:
        self._datamodule = datamodule
        self._stage = stage

    def __len__(self) -> int:
        return len(self._datamodule.held_out(self._stage))

    def __iter__(self) -> Iterator[Evaluated]:
        data = self._datamodule
        data.start()
        assert data.trainer is not None
        if data.trainer.validating:
            begin_validation(data.trainer)
        if data.run.team.size == 1:
            yield from self._evaluate()
        else:
            yield from data.run.lead(lambda: list(self._evaluate()))

    def _evaluate(self) -> Iterator[Evaluated]:
        data, stage = self._datamodule, self._stage
        session = data.session
        assert data.trainer is not None and session is not None
        version, rounds, following = data.trainer.global_step, data.run.rounds, None
        if how := self._between_rounds():
            following = rounds.begin_beside(how)

        def look(evaluated: Sequence[Evaluated]) -> None:
            self._check_accuracy(evaluated)
            if how and following:
                rounds.keep_begun(how, following)

        prompts = data.held_out(stage)
        done, settings = count(1), data.evaluation
        total = len(prompts) * (settings.num_generations + settings.greedy)

        def tell(done: int) -> None:
            fire(data.trainer, "on_evaluation_progress", done, total)  # type: ignore[arg-type]

        tell(0)
        yield from evaluate(
            prompts,
            settings,
            stage,
            lambda groups: session.rollout(
                groups,
                version,
                salt=stage,
                same_noise=True,
                watch=lambda _: tell(next(done)),
                following=following,
            ),
            data.rewards.weights,
            look,
        )

    def _between_rounds(self) -> Drawing | None:
        """Return what the next round is drawn with, if it has the weights of this validation."""
        data = self._datamodule
        run, trainer = data.run, data.trainer
        assert trainer is not None
        trains = self._stage == "val" and trainer.state.fn == "fit" and run.resumed is None
        if trains and (run.current is None or run.round_is_over):
            return run.drawing(run.rounds_over)
        return None

    def _check_accuracy(self, evaluated: Sequence[Evaluated]) -> None:
        """Warn once if no completion could ever count as correct.

        Raises:
            RunFailed: no completion has a score, and nothing was trained yet.
        """
        data, trainer = self._datamodule, self._datamodule.trainer
        assert trainer is not None
        if trainer.predicting:
            return
        if trainer.sanity_checking or trainer.state.fn != "fit":
            check_scored(evaluated)
        found = never_correct(evaluated, data.rewards.names[0], data.evaluation.threshold)
        for text in data.run.advice.of_evaluation(found):
            rank_zero_warn(text)
