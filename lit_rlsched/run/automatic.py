"""Gradient accumulation over a varying number of micro-batches, for automatic optimization."""

import torch
from lightning import Callback, LightningModule, Trainer
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_rlsched.settings import UsageError
from lit_rlsched.training.micro_batches import MicroBatch
from lit_rlsched.training.optimizers import check_gradient, loss_scale


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
        """Check that the module uses automatic optimization.

        Raises:
            UsageError: it does not.
        """
        if stage == "fit" and not pl_module.automatic_optimization:
            raise UsageError(
                f"`{type(pl_module).__name__}` optimizes manually and loops over micro-batches "
                "itself. Remove `MicroBatchAccumulation`."
            )
