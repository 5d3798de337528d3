"""Ragged micro-batches for modules with automatic optimization."""

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_rlsched.training.finite import check_gradient, loss_scale
from lit_rlsched.training.micro_batches import MicroBatch


class MicroBatchAccumulation(Callback):
    """Make one optimizer step of each step's micro-batches, however many there are.

    For LightningModules with automatic optimization, whose loader gives micro-batches one by one:
    Lightning accumulates a fixed number of batches and averages their losses, while ours vary in
    number and their losses, normalised by the step's totals, add up. The data module adds it to a
    Trainer that lacks it. A gradient that is not finite stops the run before the step.
    """

    _loss: torch.Tensor | float = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the data module, which has no such hook."""
        trainer.datamodule.on_fit_start()  # type: ignore[attr-defined]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: MicroBatch, batch_idx: int
    ) -> None:
        """Tell Lightning whether the optimizer steps after this micro-batch."""
        if batch.is_first:
            self._loss = 0.0
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        # (batch_idx + 1) % n is 0 on the last only; batch_idx % n, which wipes gradients, never
        trainer.accumulate_grad_batches = batch_idx + (1 if batch.is_last else 2)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Undo Lightning's division by the number of accumulated batches."""
        loss.mul_(trainer.accumulate_grad_batches)
        self._loss += loss.detach() / loss_scale(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at the gradient, unscaled and not yet clipped."""
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if grads:
            check_gradient(trainer, get_total_norm(grads), self._loss)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the Trainer as it was."""
        trainer.accumulate_grad_batches = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what it is not for.

        Raises:
            MisconfigurationException: the module optimizes manually.
        """
        if stage == "fit" and not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"`{type(pl_module).__name__}` optimizes manually and loops over micro-batches "
                "itself. Remove `MicroBatchAccumulation`."
            )
