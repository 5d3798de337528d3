"""SIGTERM and Ctrl-C: stop at the next place from which a resumed run is the same run."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Signals:
    """What has come while a Trainer ran.

    The first SIGINT asks the Trainer to stop as SIGTERM does; a second one, or one that comes while
    there is nothing to save yet, interrupts at once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._connector = trainer._signal_connector
        self.interrupts = 0
        """How often SIGINT has come."""

    def __call__(self, number: int, frame: Any) -> None:
        """Handle SIGINT."""
        self.interrupts += 1
        runs = bool(self._connector._original_handlers)  # Lightning listens to SIGTERM
        if self.interrupts > 1 or not runs:
            raise KeyboardInterrupt
        self._connector.received_sigterm = True
        said = "\nInterrupted: stopping and saving. Once more, and it stops without saving.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())

    @property
    def exit_code(self) -> int:
        """As a shell gives it to a process that the signal has ended."""
        return 128 + (signal.SIGINT if self.interrupts else signal.SIGTERM)


@contextmanager
def listening(trainer: Trainer) -> Iterator[Signals]:
    """Handle SIGINT meanwhile; SIGTERM is Lightning's."""
    signals = Signals(trainer)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = signal.signal(signal.SIGINT, signals)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def heed(trainer: Trainer) -> None:
    """Stop where the Trainer was asked to.

    Called where nothing is half done: between decode steps, while scores are awaited, and between
    micro-batches, where Lightning does not look.

    Raises:
        SIGTERMException: it was.
    """
    if trainer.received_sigterm:
        raise SIGTERMException(128 + signal.SIGTERM)


def settle_progress(trainer: Trainer) -> None:
    """Before a run is saved that was stopped halfway through something: let it resume exactly.

    An optimizer step that was begun counts as not begun, a validation that was begun is begun anew,
    and so does an epoch without a step: Lightning would skip it, or count a step too many.
    """
    loop = trainer.fit_loop.epoch_loop
    batches, epochs = loop.batch_progress, trainer.fit_loop.epoch_progress
    if batches.current.ready > batches.current.completed or not batches.current.completed:
        batches.is_last_batch = False
    for progress in (batches.total, batches.current):
        progress.reset_on_restart()
    if not batches.current.completed:
        for progress in (epochs.total, epochs.current):
            progress.reset_on_restart()
    if trainer.validating:
        validation: Any = loop.val_loop.batch_progress
        validation.reset()
        validation.total.ready = validation.total.started = 1  # how Lightning knows that one ran
