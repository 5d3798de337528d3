"""What a run leaves for its reader: completions, pictures and a one-line summary."""

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks import pictures
from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.callbacks.completions_table import CompletionsTable
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.callbacks.round_files import drop_rounds, save_trace
from lit_rlsched.callbacks.run_curve import RunCurve
from lit_rlsched.logs import is_partial_check
from lit_rlsched.run_folder import folder_of, leave, occupy
from lit_rlsched.settings import check_count
from lit_rlsched.training.round import Round


class RolloutLogger(RolloutCallback):
    """Write each round's completions down and draw the run, for W&B and in files without it.

    In the Trainer's `default_root_dir`, or without one in a new folder `runs/version_N`, whatever
    loggers there are: `completions.jsonl`, a row for each completion with TRL's columns;
    `learning.png`, reward and held-out accuracy; `timeline.png` and `lengths.png` of the round
    drawn last. The folder is locked meanwhile. A run that is not resumed replaces them. A
    `WandbLogger` gets the completions too, as the table `completions` that each round's rows are
    added to, and the pictures under `pictures/`; a `TensorBoardLogger` gets the pictures.

    The figures of a round are logged by the data module, to every logger. The summary and the
    pictures start at the untrained model where it was measured: `num_sanity_val_steps=-1`, which is
    the CLI's default, validates before training (Lightning's own default of 2 measures nothing).

    Args:
        num_completions: Completions of a round to write down: the first ones in the order of the
            plan, so that siblings stand together.
        every_n_rounds: Rounds from one table of completions to the next.
        pictures_every_n_rounds: Rounds from one set of pictures to the next; there is one at the
            end of training in any case.
        save_trace: Whether each round's trace is kept, as Parquet files in `traces/`.

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
        """Start the clock.

        Raises:
            FolderInUse: another process runs in the run's folder.
            MisconfigurationException: there are no rollouts.
        """
        if stage == "fit":
            rollout_datamodule(trainer, self)
            if _writes(trainer):
                self._occupied = folder_of(trainer)
                occupy(self._occupied)
            self.curve.start()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Write down the round."""
        first = self.curve.last is None
        self.curve.add_round(round)
        if not _writes(trainer):
            return
        folder = folder_of(trainer)
        if first:
            drop_rounds(folder, round.number)
        if round.number % self.every_n_rounds == 0:
            names = rollout_datamodule(trainer, self).rewards.names
            self.table.add(round, names, folder / "completions.jsonl", trainer.loggers)
        if self.save_trace:
            save_trace(round, folder / "traces")
        if (round.number + 1) % self.pictures_every_n_rounds == 0:
            pictures.publish(pictures.draw(self.curve), trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the figures; those of step 0 are the baseline."""
        if trainer.state.fn == "fit" and not is_partial_check(trainer):
            self.curve.add_validation(trainer.global_step, trainer.callback_metrics)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock and draw."""
        self.curve.stop()
        if _writes(trainer):
            pictures.publish(pictures.draw(self.curve), trainer)
        self.curve.last = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let others use the folder."""
        folder, self._occupied = self._occupied, None
        if folder is not None:
            leave(folder)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same: Lightning does not tear down after one."""
        self.teardown(trainer, pl_module, "fit")

    def summary(self, trainer: Trainer) -> str:
        """The run in one line."""
        took = self.curve.effort(rollout_datamodule(trainer, self).counters["num_completions"])
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"fast_dev_run: everything ran once ({took}); nothing was measured or written"
        return self.curve.summary(folder_of(trainer), took)

    def state_dict(self) -> dict[str, Any]:
        """The run's curve and how long it took."""
        return self.curve.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the curve of the run that is resumed."""
        self.curve.load_state_dict(state_dict)


def _writes(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
