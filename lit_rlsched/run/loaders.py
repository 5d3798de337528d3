"""Loaders that the Trainer iterates over; each draws its rollouts when it is iterated."""

from collections.abc import Generator, Iterator, Sequence
from itertools import count
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.run.evaluation import Evaluated, check_scored, evaluate, never_correct
from lit_rlsched.run.interrupts import begin_validation
from lit_rlsched.run.round_hooks import fire
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
from lit_rlsched.types import Completion, Group


class _Loader:
    def __init__(self, run: TrainingRun) -> None:
        self._run = run

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
        return self._run.settings.steps_per_epoch

    def __iter__(self) -> Iterator[OptimizerStep]:
        return self._run.optimizer_steps()


class MicroBatches(_Loader):
    """Loader for automatic optimization: one iteration is one round, one item one micro-batch.

    It has no length, as the number of micro-batches is unknown until the round is drawn.
    `MicroBatchAccumulation` tells Lightning where each optimizer step ends, and `FitSettings` how
    many steps there are.
    """

    def __iter__(self) -> Iterator[MicroBatch]:
        precision = self._run.trainer.precision_plugin
        for step in self._run.optimizer_steps():
            batches = iter(step)
            while True:
                with precision.tensor_init_context():  # of log-probs in `64-true`
                    batch = next(batches, None)
                if batch is None:
                    break
                yield batch


class Evaluation:
    """Loader of held-out prompts: one item is a prompt with its completions, in data order."""

    def __init__(self, run: TrainingRun, stage: str) -> None:
        self._run = run
        self._stage = stage

    def __len__(self) -> int:
        return len(self._run.held_out(self._stage))

    def __iter__(self) -> Iterator[Evaluated]:
        run = self._run
        run.start()
        if run.trainer.validating:
            begin_validation(run.trainer)
        if run.team.size == 1:
            yield from self._evaluate()
        else:
            yield from run.lead(lambda: list(self._evaluate()))

    def _evaluate(self) -> Iterator[Evaluated]:
        run, stage, session = self._run, self._stage, self._run.session
        assert session is not None
        prompts, version = run.held_out(stage), run.trainer.global_step
        done, settings = count(1), run.settings.evaluation
        total = len(prompts) * (settings.num_generations + settings.greedy)

        class Progress(RoundHooks):
            def completion_ended(self, completion: Completion) -> None:
                fire(run.trainer, "on_evaluation_progress", next(done), total)

        def decode(groups: list[Group]) -> Generator[Group, None, None]:
            rollout = Rollout(session, groups, version, None, Progress(), stage, held_out=True)
            rollout.load_weights()
            return rollout.decode()

        fire(run.trainer, "on_evaluation_progress", 0, total)
        yield from evaluate(
            prompts, settings, stage, decode, run.settings.rewards.weights, self._check_accuracy
        )

    def _check_accuracy(self, evaluated: Sequence[Evaluated]) -> None:
        """Warn once if no completion could ever count as correct."""
        run, trainer = self._run, self._run.trainer
        if trainer.predicting:
            return
        if trainer.sanity_checking or trainer.state.fn != "fit":
            check_scored(evaluated)
        found = never_correct(
            evaluated, run.settings.rewards.names[0], run.settings.evaluation.threshold
        )
        for text in run.advice.once(never_correct=found):
            rank_zero_warn(text)
