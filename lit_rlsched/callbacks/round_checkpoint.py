"""Resumable checkpoints: at the end of rounds where they are cheap, and when a run is stopped."""

import time
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.interrupts import settle_progress
from lit_rlsched.run_folder import folder_of


class RoundCheckpoint(Checkpoint):
    """Save the run at the end of a round, where that takes no more than a share of its time.

    After the first round, then whenever all saves together, the next one included, stay within
    `max_share` of the run's time, and after the last round in any case. Also where the run is
    stopped by SIGTERM (or Ctrl-C, in the CLI), in the middle of whatever it does. The newest
    `keep` files are kept. It goes beside a `ModelCheckpoint`, and saves nothing at a step that one
    with `save_last` has just saved.

    A save that fails, as on a full disk, costs no more than the save: it is warned about.

    Args:
        dirpath: Where; by default `checkpoints/` in the run's folder.
        max_share: Most of the run's time that saving may take.
        keep: How many files stay.

    Raises:
        ValueError: a number is out of range.

    Example::

        Trainer(default_root_dir="runs/gsm8k", callbacks=[RoundCheckpoint()])
    """

    best_model_path = ""
    """For `ckpt_path="best"`: there is none."""

    def __init__(self, dirpath: str | None = None, max_share: float = 0.02, keep: int = 2) -> None:
        if not 0 < max_share <= 1:
            raise ValueError(f"`RoundCheckpoint(max_share={max_share})`: use 0 < max_share <= 1.")
        if keep < 1:
            raise ValueError(f"`RoundCheckpoint(keep={keep})`: must be 1 or more.")
        self.dirpath = dirpath
        self.max_share = max_share
        self.keep = keep
        self.last_path: Path | None = None
        """The newest file that this run has saved."""
        self._clock = time.monotonic
        self._began = 0.0
        self._spent = 0.0
        self._last = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the clock.

        Raises:
            MisconfigurationException: there are no rollouts.
        """
        if stage == "fit":
            rollout_datamodule(trainer, self)
            self._began, self._spent, self._last = self._clock(), 0.0, 0.0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if it is time to."""
        over = _is_last(trainer)
        spent, run = self._spent + self._last, self._clock() - self._began
        affordable = self._last == 0 or spent <= self.max_share * run
        if (over or affordable) and not _just_saved(trainer):
            self._save(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save a run that was asked to stop."""
        trains = trainer.state.fn == "fit" and not trainer.sanity_checking
        if isinstance(exception, SIGTERMException) and trains:
            self._save(trainer, stopped=True)

    def _save(self, trainer: Trainer, stopped: bool = False) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = self._folder(trainer) / f"{_name(trainer)}.ckpt"
        began = self._clock()
        try:
            if stopped:
                settle_progress(trainer)
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            rank_zero_warn(f"The run goes on without a checkpoint of now: {error}")
        else:
            self.last_path = path
            self._prune(path)
        self._last = self._clock() - began
        self._spent += self._last

    def _prune(self, newest: Path) -> None:
        files = sorted(newest.parent.glob("round_*.ckpt"), key=lambda p: p.stat().st_mtime_ns)
        others = [path for path in files if path != newest]
        for path in others[: len(others) - (self.keep - 1)]:
            path.unlink(missing_ok=True)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath) if self.dirpath else folder_of(trainer) / "checkpoints"


def _name(trainer: Trainer) -> str:
    """Says how many rounds are over, and how many optimizer steps are taken."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    return f"round_{datamodule.rounds_over:05}-step_{trainer.global_step:06}"


def _is_last(trainer: Trainer) -> bool:
    """Whether training ends with this epoch."""
    rounds = trainer.current_epoch + 1 == trainer.max_epochs
    return rounds or trainer.global_step == trainer.max_steps or trainer.should_stop


def _just_saved(trainer: Trainer) -> bool:
    """Whether somebody has saved all of the run at this step."""
    return any(
        isinstance(callback, ModelCheckpoint)
        and callback.save_last
        and not callback.save_weights_only
        and callback._last_global_step_saved == trainer.global_step
        for callback in trainer.checkpoint_callbacks
    )
