"""Resumable checkpoints at the end of rounds and when a run is stopped."""

import re
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks.rollout_callback import run_of
from lit_rlsched.run.interrupts import is_requeued, settle_progress
from lit_rlsched.run.saving.run_folder import folder_of
from lit_rlsched.settings import RemembersInit


class RoundCheckpoint(RemembersInit, Checkpoint):
    """Save a resumable checkpoint at the end of rounds, as often as its cost allows.

    It saves after the first round, then whenever all saves together take at most `max_share` of the
    run's time, and after the last round. It also saves when SIGTERM (or Ctrl-C in the CLI) stops
    the run, even in the middle of a round. If a save fails, the run continues with a warning.

    See `docs/howto/resume.md`.

    Args:
        dirpath: Folder of the checkpoints; by default `checkpoints/` in the run's folder.
        max_share: Maximum share of the run's time that saving may take.
        keep: Number of checkpoints to keep.

    Raises:
        UsageError: a number is out of range.

    Example::

        Trainer(default_root_dir="runs/gsm8k", callbacks=[RoundCheckpoint()])
    """

    best_model_path = ""
    """Read by Lightning for `ckpt_path="best"`: no checkpoint is best."""

    def __init__(self, dirpath: str | None = None, max_share: float = 0.02, keep: int = 2) -> None:
        self.dirpath, self.max_share, self.keep = dirpath, max_share, keep
        self.last_path: Path | None = None
        """Newest file that this run has saved."""
        self._clock = time.monotonic
        self._began = self._spent = self._last = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the clock; refuse another data module than `RolloutDataModule`."""
        if stage == "fit":
            run_of(trainer, self)
            self._began, self._spent, self._last = self._clock(), 0.0, 0.0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the run's time allows it or training ends."""
        spent, run = self._spent + self._last, self._clock() - self._began
        affordable = self._last == 0 or spent <= self.max_share * run
        last = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        last = last or trainer.global_step == trainer.max_steps
        just_saved = any(  # it deletes that file only after it has saved a later one
            isinstance(callback, ModelCheckpoint)
            and not callback.save_weights_only
            and callback._last_global_step_saved == trainer.global_step
            and Path(callback._last_checkpoint_saved).exists()
            for callback in trainer.checkpoint_callbacks
        )
        due = (affordable or last) and not just_saved
        if trainer.strategy.broadcast(due):  # the clocks and disks of ranks differ
            self._save(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save if the run was asked to stop."""
        trains = trainer.state.fn == "fit" and not trainer.sanity_checking
        stopped = isinstance(exception, SIGTERMException) and trains
        if stopped and not is_requeued(trainer):  # Lightning saves that one
            self._save(trainer, stopped=True)

    def _save(self, trainer: Trainer, stopped: bool = False) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        run = run_of(trainer, self)
        folder = Path(self.dirpath) if self.dirpath else folder_of(trainer) / "checkpoints"
        path = folder / f"round_{run.rounds_over:05}-step_{trainer.global_step:06}.ckpt"
        run.wait_for_rollout()  # is no cost
        began = self._clock()
        try:
            if stopped:
                settle_progress(trainer)
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other ranks wait
            rank_zero_warn(f"No checkpoint was saved, and the run continues: {error}")
        else:
            self.last_path = path
            if trainer.is_global_zero:
                self._prune(path)
        self._last = self._clock() - began
        self._spent += self._last

    def _prune(self, newest: Path) -> None:
        """Delete all but the newest `keep` checkpoints; first those of rounds to be drawn anew."""
        found = {*newest.parent.glob("round_*.ckpt")}
        numbers = {p: [*map(int, re.findall(r"\d+", p.name))] for p in (*found, newest)}
        last = numbers[newest]
        others = sorted(found, key=lambda path: (numbers[path] <= last, numbers[path]))[:-1]
        for path in others[: len(others) - (self.keep - 1)]:
            path.unlink(missing_ok=True)


class RNGState(Callback):
    """Store the random states of Python, NumPy and torch in checkpoints, so that resume is exact.

    They are restored when training starts, after the sanity check and the set-up of the loaders.
    """

    _saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors only, for `torch.load(weights_only=True)`."""
        states = _collect_rng_states()
        kind, keys, *rest = states["numpy"]
        return {**states, "numpy": [kind, keys.tolist(), *rest]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the states until training starts."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the states."""
        if self._saved is not None:
            _set_rng_states(self._saved)
            self._saved = None
