"""SIGTERM, Ctrl-C and SLURM's signal: stop where a resumed run is the same as one never stopped."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException


class InterruptHandler:
    """Handler of SIGINT that lets the first Ctrl-C stop the Trainer as SIGTERM does.

    A second Ctrl-C, or one that comes before there is anything to save, interrupts at once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._connector = trainer._signal_connector
        self.interrupts = 0
        """Number of SIGINTs received."""

    def __call__(self, number: int, frame: Any) -> None:
        """Handle one SIGINT."""
        self.interrupts += 1
        fitting = bool(self._connector._original_handlers)  # Lightning handles SIGTERM
        if self.interrupts > 1 or not fitting:
            raise KeyboardInterrupt
        ask_to_stop(self._connector)
        message = "\nInterrupted: stopping and saving. Press Ctrl-C again to stop without saving.\n"
        # `print` is not safe in a signal handler
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, message.encode())

    @property
    def exit_code(self) -> int:
        """Exit code that a shell gives to a process ended by this signal."""
        return 128 + (signal.SIGINT if self.interrupts else signal.SIGTERM)


@contextmanager
def listening(trainer: Trainer) -> Iterator[InterruptHandler]:
    """Handle SIGINT in this block. Lightning handles SIGTERM."""
    handler = InterruptHandler(trainer)
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGINT, before)


def only_ask(trainer: Trainer, fits: bool) -> None:
    """Let signals only ask the Trainer to stop; its ranks then do so together.

    Lightning's handlers of SIGTERM (on several ranks) and of SLURM's signal talk to the other ranks
    or save in the middle of whatever this one does. Both sides hang if they wait for something
    else, and what is saved may be half a step.
    """
    connector: Any = trainer._signal_connector
    if trainer.world_size > 1:
        connector.asked_to_stop = False
        connector._sigterm_notifier_fn = lambda number, frame: ask_to_stop(connector)
    if fits:
        connector.requeue_signal = 0
        connector._slurm_sigusr_handler_fn = lambda number, frame: ask_to_stop(connector, number)


def is_requeued(trainer: Trainer) -> bool:
    """Whether SLURM's signal stopped a fit that goes on when SLURM starts the job again.

    Called by all ranks once they stop.
    """
    connector: Any = trainer._signal_connector
    asked = getattr(connector, "requeue_signal", None)
    environment = trainer._accelerator_connector.cluster_environment
    if asked is None or not isinstance(environment, SLURMEnvironment):
        return False
    return trainer.strategy.reduce_boolean_decision(asked > 0, all=False)


def requeue(trainer: Trainer) -> None:
    """Save a stopped run where Lightning looks for it, and put its job back into SLURM's queue."""
    settle_progress(trainer)
    connector: Any = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, connector.requeue_signal, None)
    connector.was_requeued = True


def was_requeued(trainer: Trainer) -> bool:
    """Whether the run has been saved for the next start of its job."""
    return getattr(trainer._signal_connector, "was_requeued", False)


def ask_to_stop(connector: Any, requeue_signal: int = 0) -> None:
    """Note that a signal asks the run to stop, perhaps to be put back into SLURM's queue."""
    if requeue_signal:
        connector.requeue_signal = requeue_signal
    if hasattr(connector, "asked_to_stop"):
        connector.asked_to_stop = True
    else:
        connector.received_sigterm = True


def asked_to_stop(trainer: Trainer) -> bool:
    """Whether a signal has asked this process to stop."""
    return trainer.received_sigterm or getattr(trainer._signal_connector, "asked_to_stop", False)


def check_interrupt(trainer: Trainer) -> None:
    """Stop the run if a signal asked for it.

    Called where nothing is half done and Lightning does not look: between decode steps, while
    waiting for scores, and between micro-batches.
    """
    if asked_to_stop(trainer):
        raise SIGTERMException(128 + signal.SIGTERM)


def settle_progress(trainer: Trainer) -> None:
    """Reset Lightning's progress so that a run stopped halfway through something resumes exactly.

    Without this, Lightning would skip an epoch that has no step yet, or count one step too many.
    An optimizer step that had started counts as not started, and a validation starts again. A run
    stopped after the last hook of an epoch resumes as from a checkpoint of that hook.
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
    elif epochs.current.completed == epochs.current.ready:
        for progress in (epochs.total, epochs.current):
            progress.completed -= 1
    if trainer.validating:
        validation: Any = loop.val_loop.batch_progress
        validation.reset()
        # tells Lightning that one was running, until `begin_validation`
        validation.total.ready = validation.total.started = 1


def count_epoch(trainer: Trainer) -> None:
    """Count the epoch that begins if Lightning has not done so.

    It forgets the one after a checkpoint of an epoch's last step, which `ModelCheckpoint` saves
    before the epoch ends. A run that is resumed from a later one then trains one round too many.
    """
    progress: Any = trainer.fit_loop.epoch_progress
    if progress.total.started == progress.total.processed:
        progress.increment_ready()
        progress.increment_started()


def begin_validation(trainer: Trainer) -> None:
    """Remove the mark of `settle_progress`: this validation is the one that was interrupted.

    Otherwise a checkpoint after it would say that it was interrupted too.
    """
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()
