"""Adapts a Trainer, while it fits, to count optimizer steps and rounds instead of batches."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_rlsched.run.checks import check_accumulation
from lit_rlsched.run.interrupts import count_epoch
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.saving.module_state import ThawedWeights
from lit_rlsched.scheduling.timeline import TRAINER, UPDATE, Timeline
from lit_rlsched.settings import UsageError
from lit_rlsched.training.micro_batches import MicroBatch
from lit_rlsched.training.optimizers import check_gradient, loss_scale


class FitSettings:
    """Changes the Trainer's settings about batches to be about optimizer steps.

    `log_every_n_steps` is at most the number of steps in a round, so every round is logged.

    With automatic optimization Lightning's batches are micro-batches. A round has any number of
    them, so Lightning can neither count steps ahead nor cut a round between two steps. In this case
    `MicroBatchAccumulation` is added, `estimated_stepping_batches` is right in
    `configure_optimizers`, and `limit_train_batches`, `overfit_batches` and `fast_dev_run` take the
    first optimizer steps of a round, as they do with manual optimization.

    The Trainer is about to fit and has its module and data module. `record` gets what the module
    logs, and what `timeline` returns the times of updates.
    """

    def __init__(
        self,
        trainer: Trainer,
        steps_per_round: int,
        record: RunRecord,
        timeline: Callable[[], Timeline | None] = lambda: None,
    ) -> None:
        self._trainer = trainer
        self._undo = ExitStack()
        self._counting = False
        self.steps = _limited(trainer, steps_per_round)
        """Number of optimizer steps taken per round."""
        if self.steps and trainer.log_every_n_steps > self.steps:  # type: ignore[attr-defined]
            self._set(log_every_n_steps=self.steps)
        bar = trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and trainer.max_epochs == -1:
            # Lightning writes `Epoch 1/-2`
            bar._get_train_description = "Epoch {}".format  # type: ignore[method-assign]
            self._undo.callback(lambda: vars(bar).pop("_get_train_description", None))
        if self.steps and trainer.lightning_module.automatic_optimization:
            check_accumulation(trainer)
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            if not any(isinstance(c, MicroBatchAccumulation) for c in callbacks):
                self._add(MicroBatchAccumulation())
            # the loader itself ends at the limit, and the callback accumulates
            self._set(limit_train_batches=1.0, accumulate_grad_batches=1)
            # `estimated_stepping_batches` takes the length of this loader, which nothing iterates
            # over
            trainer.fit_loop._combined_loader = CombinedLoader(range(self.steps))
            trainer.fit_loop.max_batches = self.steps
            self._counting = True
        self._add(Recorder(record, timeline))
        self._add(ThawedWeights())

    @property
    def rounds_left(self) -> int | None:
        """Number of rounds until training ends, with the one that begins now; `None`: no end."""
        trainer, ends = self._trainer, list[int]()
        if trainer.max_epochs not in (None, -1):
            ends.append(trainer.max_epochs - trainer.current_epoch)
        if trainer.max_steps >= 0 and self.steps:
            ends.append(-(-(trainer.max_steps - trainer.global_step) // self.steps))
        return min(ends, default=None)

    def begin(self) -> None:
        """Let the Trainer use the real loader; called once optimizers are configured."""
        if self._counting:
            self._counting = False
            self._trainer.fit_loop._combined_loader = None
            self._trainer.fit_loop.max_batches = math.inf

    def undo(self) -> None:
        """Restore the Trainer's own settings; safe to call twice."""
        self.begin()
        self._undo.close()

    def _add(self, callback: Callback) -> None:
        trainer: Any = self._trainer
        trainer.callbacks.insert(0, callback)
        self._undo.callback(lambda: trainer.callbacks.remove(callback))

    def _set(self, **settings: Any) -> None:
        for name, value in settings.items():
            self._undo.callback(setattr, self._trainer, name, getattr(self._trainer, name))
            setattr(self._trainer, name, value)


def _limited(trainer: Trainer, steps: int) -> int:
    """Number of optimizer steps per round within the Trainer's limits."""
    limit = trainer.limit_train_batches
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]
    left = min(steps, limit) if isinstance(limit, int) else int(steps * limit)
    if limit and not left:
        raise UsageError(
            f"`Trainer({name}={limit})` leaves nothing: a round has {steps} optimizer steps, which "
            f"count as its batches. Use {1 / steps:g} or more, or 1 for one step."
        )
    if 0 < left < steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"`Trainer({name}={limit})` takes {left} of the {steps} optimizer steps of each round; "
            "the completions of the other steps are drawn but not trained on, and counted in "
            "`dropped/limit_train_batches`."
        )
    return left


def log_now(
    trainer: Trainer, metrics: Mapping[str, float | Tensor], step: int | None = None
) -> None:
    """Send metrics to every logger and make them available to callbacks that monitor them.

    Lightning refuses `self.log` between its hooks, and would repeat the metrics of a round at each
    of its steps. `LearningRateMonitor` logs in the same way. `step` is the position on the x-axis
    of the loggers, by default the number of optimizer steps taken.
    """
    plain = {name: float(value) for name, value in metrics.items()}
    if step is None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(plain, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in plain.items()})


def is_partial_check(trainer: Trainer) -> bool:
    """Return whether this is a sanity check whose metrics mean nothing.

    A sanity check of all prompts (`num_sanity_val_steps=-1`) before training is the baseline.
    """
    partial = trainer.num_sanity_val_batches != trainer.num_val_batches
    return trainer.sanity_checking and (partial or trainer.global_step > 0)


class Recorder(Callback):
    """Adds to the run's record what the module logs, and to its timeline when it is updated."""

    def __init__(
        self, record: RunRecord, timeline: Callable[[], Timeline | None] = lambda: None
    ) -> None:
        self.record = record
        self._timeline = timeline
        self._began = 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Count the epoch if Lightning has not, and note when the update or a part of it begins."""
        count_epoch(trainer)
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Add the metrics of the round's last step, before a checkpoint is saved."""
        metrics = trainer.callback_metrics
        self.record.add_metrics({k: metrics[k] for k in ("kl", "entropy") if k in metrics})
        if (timeline := self._timeline()) is not None:
            timeline.add(TRAINER, UPDATE, self._began, timeline.now())

    def on_fit_end(self, trainer: Trainer, *args: Any) -> None:
        """Take the last lap of the timeline: the last update."""
        if (timeline := self._timeline()) is not None:
            timeline.mark()
            timeline.lap()

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        """Add the `val/` metrics; those of step 0 are the baseline."""
        if trainer.state.fn == "fit" and not is_partial_check(trainer):
            self.record.add_validation(trainer.global_step, trainer.callback_metrics)


class StepMetrics:
    """Metrics of an optimizer step from those of its micro-batches.

    The mean is weighted by tokens. Names that end with `min` or `max` keep the extreme value.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weight = 0.0

    def update(self, metrics: Mapping[str, Tensor], weight: float) -> None:
        """Add the metrics of one micro-batch with `weight` tokens."""
        weighted = {n: value if _extreme(n) else value * weight for n, value in metrics.items()}
        self.add(weighted, weight)

    def add(self, sums: Mapping[str, Tensor], weight: float) -> None:
        """Add the sums of another rank."""
        self.weight += weight
        for name, value in sums.items():
            add = _extreme(name) or torch.add
            self.sums[name] = add(self.sums[name], value) if name in self.sums else value

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics of the step; empty if there was no micro-batch."""
        return {
            name: value if _extreme(name) else value / max(self.weight, 1.0)
            for name, value in self.sums.items()
        }


def _extreme(name: str) -> Any:
    if name.endswith(("/min", "_min")):
        return torch.minimum
    return torch.maximum if name.endswith(("/max", "_max")) else None


class Clock:
    """Measures the time in `fit` since a run began, including the runs it was resumed from."""

    def __init__(self) -> None:
        self.before = 0.0
        """Seconds until the last `stop`, or of the checkpoint."""
        self._runs = False
        self._since = 0.0
        """When `before` seconds were over: at the last start, or at the stop after it."""

    @property
    def seconds(self) -> float:
        """Time measured so far."""
        return self.at(time.monotonic()) if self._runs else self.before

    def at(self, moment: float) -> float:
        """Return what it shows at a moment of `time.monotonic` since it was started."""
        return self.before + moment - self._since

    def start(self) -> None:
        """Start the clock."""
        self._runs, self._since = True, time.monotonic()

    def stop(self) -> None:
        """Stop the clock."""
        if self._runs:
            now = time.monotonic()
            self.before, self._since, self._runs = self.at(now), now, False


class MicroBatchAccumulation(Callback):
    """Take one optimizer step per `OptimizerStep`, however many micro-batches it has.

    For LightningModules with automatic optimization, whose loader yields single micro-batches.
    Lightning accumulates a fixed number of batches and averages their losses; ours vary in number,
    and their losses, normalised by the totals of the step, are summed. The data module adds this
    callback where it is missing. A gradient that is not finite stops the run before the step.
    """

    _loss: torch.Tensor | float = 0.0
    _scale: float = 1.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the Trainer use the real loader, now that optimizers are configured."""
        trainer.datamodule.run.fit_settings.begin()  # type: ignore[attr-defined]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: MicroBatch, batch_idx: int
    ) -> None:
        """Tell Lightning whether the optimizer steps after this micro-batch."""
        self._scale = batch.scale
        if batch.is_first:
            self._loss = 0.0
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        # Lightning steps where (batch_idx + 1) % n is 0: only on the last one. It resets gradients
        # where batch_idx % n is 0: never.
        trainer.accumulate_grad_batches = batch_idx + (1 if batch.is_last else 2)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Undo Lightning's division by the number of accumulated batches."""
        loss.mul_(trainer.accumulate_grad_batches * self._scale)
        self._loss += loss.detach() / loss_scale(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Check the gradient, which is unscaled and not clipped yet."""
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if grads:
            check_gradient(trainer, get_total_norm(grads), self._loss)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the setting of the Trainer."""
        trainer.accumulate_grad_batches = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that optimizes manually."""
        if stage == "fit" and not pl_module.automatic_optimization:
            raise UsageError(
                f"`{type(pl_module).__name__}` optimizes manually and loops over micro-batches "
                "itself. Remove `MicroBatchAccumulation`."
            )
