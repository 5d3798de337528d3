"""Output of a run for its reader: completions, pictures and a one-line summary."""

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.callbacks.completions_table import CompletionsTable
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.callbacks.run_curve import RunCurve
from lit_rlsched.logs import is_partial_check
from lit_rlsched.run_folder import folder_of, leave, name_of, occupy
from lit_rlsched.settings import check_count
from lit_rlsched.training.round import Round


class RolloutLogger(RolloutCallback):
    """Record what a run drew: tables of completions, pictures.

    The folder is the Trainer's `default_root_dir`, or without one a new folder `runs/version_N`.
    It gets `completions.jsonl`, with TRL's columns; `learning.png`, reward and held-out accuracy;
    and `timeline.png` and `lengths.png` of the latest round. It is locked during the run, and a run
    that is not resumed replaces these files. With each set of pictures and after the first round, a
    `WandbLogger` gets the table `completions` (at most about 512 rows, of rounds in equal steps
    over the whole run) and a `TensorBoardLogger` the newest rows as text; both get the pictures,
    under `pictures/`.

    The data module logs the metrics of rounds. Summary and pictures include the untrained model if
    it was measured, as with `num_sanity_val_steps=-1`, the CLI's default; Lightning's own default
    of 2 measures nothing.

    Args:
        num_completions: Completions to write per table: the first ones in the order of the plan, so
            that completions of a prompt are together.
        every_n_rounds: Rounds between two tables of completions.
        pictures_every_n_rounds: Rounds between two sets of pictures; the end of training always
            gets one.
        save_trace: Whether to keep each round's trace as Parquet files in `traces/`.

    Raises:
        ValueError: a number is out of range.

    Example::

        Trainer(default_root_dir="runs/gsm8k", callbacks=[RolloutLogger(num_completions=32)])
    """

    def __init__(
        self,
        num_completions: int = 16,
        every_n_rounds: int = 1,
        pictures_every_n_rounds: int = 20,
        save_trace: bool = False,
    ) -> None:
        check_count("RolloutLogger", "num_completions", num_completions, 0)
        check_count("RolloutLogger", "every_n_rounds", every_n_rounds, 1)
        check_count("RolloutLogger", "pictures_every_n_rounds", pictures_every_n_rounds, 1)
        self.every_n_rounds = every_n_rounds
        self.pictures_every_n_rounds = pictures_every_n_rounds
        self.save_trace = save_trace
        self.curve = RunCurve()
        self.table = CompletionsTable(num_completions)
        self._occupied: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lock the folder and start the clock.

        Raises:
            FolderInUse: another process uses the run's folder.
            MisconfigurationException: there is no `RolloutDataModule`.
        """
        if stage == "fit":
            rollout_datamodule(trainer, self)
            if _writes(trainer):
                self._occupied = folder_of(trainer)
                occupy(self._occupied)
            self.curve.start()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Write the round's rows, trace and pictures."""
        first = self.curve.last is None
        self.curve.add_round(round)
        if not _writes(trainer):
            return
        folder = folder_of(trainer)
        if first:
            self._drop_rounds(folder, round.ordinal)
        if round.number % self.every_n_rounds == 0:
            names = rollout_datamodule(trainer, self).rewards.names
            self.table.add(round, names, folder / "completions.jsonl")
        if self.save_trace:
            _save_trace(round, folder / "traces")
        if round.ordinal % self.pictures_every_n_rounds == 0:
            self._draw(trainer)
        elif first:  # whoever looks early sees whether answers look as they should
            self.table.publish(trainer.loggers, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Remember the metrics of the round's last step, before a checkpoint is saved."""
        self.curve.add_update(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the `val/` metrics; those of step 0 are the baseline."""
        if trainer.state.fn == "fit" and not is_partial_check(trainer):
            self.curve.add_validation(trainer.global_step, trainer.callback_metrics)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock and draw the pictures."""
        self.curve.clock.stop()
        if _writes(trainer):
            self._draw(trainer)
        self.curve.last = None

    def _draw(self, trainer: Trainer) -> None:
        from lit_rlsched.callbacks import pictures  # imports matplotlib

        name = name_of(folder_of(trainer))
        pictures.publish(pictures.draw(self.curve, name), trainer)
        self.table.publish(trainer.loggers, trainer.global_step)

    def _drop_rounds(self, folder: Path, number: int) -> None:
        """Delete what the folder has of round `number` and later, of another or an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        self.table.begin(folder / "completions.jsonl", number)
        for path in (folder / "traces").glob("round_*.parquet"):
            if int(path.stem.split("_")[1]) >= number:
                path.unlink()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unlock the folder."""
        folder, self._occupied = self._occupied, None
        if folder is not None:
            leave(folder)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Unlock the folder: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def summary(self, trainer: Trainer) -> str:
        """Return the run in one line."""
        data = rollout_datamodule(trainer, self)
        took = self.curve.effort(data.counters["num_completions"])
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"fast_dev_run: everything ran once ({took}); nothing was measured or written"
        temperature = data.evaluation.sampling.temperature
        return self.curve.summary(folder_of(trainer), took, temperature)

    def state_dict(self) -> dict[str, Any]:
        """Return the curve and time of the run."""
        return self.curve.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the curve of a resumed run."""
        self.curve.load_state_dict(state_dict)


def _writes(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _save_trace(round: Round, folder: Path) -> None:
    import pyarrow.parquet as pq

    if round.trace is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in round.trace.tables().items():
        pq.write_table(table, folder / f"round_{round.ordinal:05}_{name}.parquet")
