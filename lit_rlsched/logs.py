"""Figures: averaged over micro-batches, and logged outside Lightning's loops."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor


def log_now(
    trainer: Trainer, metrics: Mapping[str, float | torch.Tensor], step: int | None = None
) -> None:
    """Send figures to every logger at once, and let callbacks monitor them.

    `self.log` is refused between Lightning's hooks, and would repeat a round's figures at each of
    its steps; this is the way LearningRateMonitor takes.

    Args:
        trainer: Whose loggers.
        metrics: The figures by name.
        step: Where on the loggers' x-axis; by default the number of the coming optimizer step.
    """
    plain = {name: float(value) for name, value in metrics.items()}
    if step is None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(plain, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in plain.items()})


def is_partial_check(trainer: Trainer) -> bool:
    """Whether this is a sanity check on some of the held-out prompts, which measures nothing.

    One on all of them that are validated on (`num_sanity_val_steps=-1`) is the baseline.
    """
    partial = trainer.num_sanity_val_batches != trainer.num_val_batches
    return trainer.sanity_checking and (partial or trainer.global_step > 0)


class StepMetrics:
    """Averages over micro-batches, by tokens; `min` and `max` of what is named so."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0

    def update(self, metrics: dict[str, Tensor], weight: float) -> None:
        """Take in one micro-batch."""
        self._weight += weight
        for name, value in metrics.items():
            if (best := _extreme(name)) is None:
                value = value * weight
                self._sums[name] = self._sums[name] + value if name in self._sums else value
            else:
                self._sums[name] = best(self._sums.get(name, value), value)

    def compute(self) -> dict[str, Tensor]:
        """The step's figures; empty where there was no micro-batch."""
        return {
            name: value if _extreme(name) else value / max(self._weight, 1.0)
            for name, value in self._sums.items()
        }


def _extreme(name: str) -> Any:
    if name.endswith(("/min", "_min")):
        return torch.minimum
    return torch.maximum if name.endswith(("/max", "_max")) else None
