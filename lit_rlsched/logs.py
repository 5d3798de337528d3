"""Logging outside Lightning's loops."""

from collections.abc import Mapping

import torch
from lightning import Trainer


def log_now(trainer: Trainer, metrics: Mapping[str, float | torch.Tensor]) -> None:
    """Send figures to every logger at once, and let callbacks monitor them.

    `self.log` is refused between Lightning's hooks, and would repeat a round's figures at each of
    its steps; this is the way LearningRateMonitor takes.
    """
    plain = {name: float(value) for name, value in metrics.items()}
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(plain, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in plain.items()})
