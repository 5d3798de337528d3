"""What the command line says at the end of a run, also of one that a signal has stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rlsched.callbacks import RolloutLogger, RoundCheckpoint
from lit_rlsched.interrupts import listening


def say_result(trainer: Trainer) -> None:
    """Close W&B, which prints on exit, so that the summary is the last line."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutLogger):
            print(callback.summary(trainer), flush=True)


@contextmanager
def stoppable(trainer: Trainer) -> Iterator[None]:
    """Meanwhile SIGTERM and the first Ctrl-C stop the run in order, and a second one at once.

    Raises:
        SystemExit: with the code of the signal, after the result and how to go on are told.
    """
    with listening(trainer) as signals:
        try:
            yield
        except SIGTERMException:
            _say_stopped(trainer)
            raise SystemExit(signals.exit_code) from None
        except (SystemExit, KeyboardInterrupt):  # Lightning's answer to Ctrl-C has another code
            if not signals.interrupts:
                raise
            raise SystemExit(signals.exit_code) from None


def _say_stopped(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutLogger):
            callback.on_fit_end(trainer, trainer.lightning_module)
    say_result(trainer)
    paths = [
        callback.last_path
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, RoundCheckpoint) and callback.last_path is not None
    ]
    how = f"resume with `--ckpt_path {paths[-1]}`" if paths else "nothing was saved"
    print(f"Stopped before its end: {how}", flush=True)
