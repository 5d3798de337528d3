"""Ragged micro-batches for modules with automatic optimization."""

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.data.batching import MicroBatch


class MicroBatchAccumulation(Callback):
    """Make one optimizer step of each step's micro-batches, however many there are.

    For LightningModules with automatic optimization, whose loader gives micro-batches one by one:
    Lightning accumulates a fixed number of batches and averages their losses, while ours vary in
    number and their losses, normalised by the step's totals, add up.
    """

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: MicroBatch, batch_idx: int
    ) -> None:
        """Tell Lightning whether the optimizer steps after this micro-batch."""
        if batch.is_first:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        # (batch_idx + 1) % n is 0 on the last only; batch_idx % n, which wipes gradients, never
        trainer.accumulate_grad_batches = batch_idx + (1 if batch.is_last else 2)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Undo Lightning's division by the number of accumulated batches."""
        loss.mul_(trainer.accumulate_grad_batches)

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
