"""Metrics: averaged over micro-batches, and logged outside Lightning's loops."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor


def log_now(
    trainer: Trainer, metrics: Mapping[str, float | Tensor], step: int | None = None
) -> None:
    """Send metrics to every logger and make them available to callbacks that monitor them.

    Lightning refuses `self.log` between its hooks, and would repeat the metrics of a round at each
    of its steps. `LearningRateMonitor` logs in the same way.

    Args:
        trainer: Trainer whose loggers are used.
        metrics: Values by name.
        step: Position on the x-axis of the loggers. Default: the number of optimizer steps taken.
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


class StepMetrics:
    """Metrics of an optimizer step from those of its micro-batches.

    The mean is weighted by tokens. Names that end with `min` or `max` keep the extreme value.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0

    def update(self, metrics: dict[str, Tensor], weight: float) -> None:
        """Add the metrics of one micro-batch with `weight` tokens."""
        self._weight += weight
        for name, value in metrics.items():
            self._merge(name, value if _extreme(name) else value * weight)

    def add(self, other: "StepMetrics") -> None:
        """Add the micro-batches of another rank."""
        self._weight += other._weight
        for name, value in other._sums.items():
            self._merge(name, value)

    def _merge(self, name: str, value: Tensor) -> None:
        add = _extreme(name) or torch.add
        self._sums[name] = add(self._sums[name], value) if name in self._sums else value

    def to(self, device: torch.device | str) -> "StepMetrics":
        """Return a copy on another device."""
        moved = StepMetrics()
        moved._weight = self._weight
        moved._sums = {name: value.to(device) for name, value in self._sums.items()}
        return moved

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics of the step; empty if there was no micro-batch."""
        return {
            name: value if _extreme(name) else value / max(self._weight, 1.0)
            for name, value in self._sums.items()
        }


def _extreme(name: str) -> Any:
    if name.endswith(("/min", "_min")):
        return torch.minimum
    return torch.maximum if name.endswith(("/max", "_max")) else None
