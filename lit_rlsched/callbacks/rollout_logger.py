"""What a run leaves for its reader: completions, pictures and a one-line summary."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks import pictures
from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.callbacks.completions_table import (
    RENAMED,
    append_rows,
    completion_row,
    drop_rows,
)
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.logs import is_partial_check
from lit_rlsched.run_folder import folder_of, leave, occupy
from lit_rlsched.training.round import Round

if TYPE_CHECKING:
    import wandb
    from matplotlib.figure import Figure


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
        for name, value, least in (
            ("num_completions", num_completions, 0),
            ("every_n_rounds", every_n_rounds, 1),
            ("pictures_every_n_rounds", pictures_every_n_rounds, 1),
        ):
            if value < least:
                raise ValueError(f"`RolloutLogger({name}={value})`: must be {least} or more.")
        self.num_completions = num_completions
        self.every_n_rounds = every_n_rounds
        self.pictures_every_n_rounds = pictures_every_n_rounds
        self.save_trace = save_trace
        self.rounds: list[dict[str, float]] = []
        """`round`, `step` and `reward` of each round since the run began."""
        self.validations: list[dict[str, float]] = []
        """`step` and every `val/` figure of each validation, the one before training included."""
        self._seconds = 0.0
        self._started: float | None = None
        self._last: Round | None = None
        self._clean = False
        self._occupied: Path | None = None
        self._renamed: set[str] = set()
        self._tables: dict[Any, wandb.Table] = {}

    # Hooks.

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
            self._started, self._clean, self._last = time.monotonic(), False, None

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Write down the round."""
        self._last = round
        reward = round.metrics["reward"]
        self.rounds.append({"round": round.number, "step": round.version, "reward": reward})
        if not _writes(trainer):
            return
        folder = folder_of(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if not self._clean:
            drop_rows(folder / "completions.jsonl", round.number)
            for path in (folder / "traces").glob("round_*.parquet"):
                if int(path.stem.split("_")[1]) >= round.number:
                    path.unlink()
            self._clean = True
        if round.number % self.every_n_rounds == 0:
            rows = self._rows(round, rollout_datamodule(trainer, self).rewards.names)
            append_rows(folder / "completions.jsonl", rows)
            self._log_table(trainer, rows, round.version)
        if self.save_trace and round.trace is not None:
            _save_trace(round, folder / "traces")
        if (round.number + 1) % self.pictures_every_n_rounds == 0:
            self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the figures; those of step 0 are the baseline."""
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        if trainer.state.fn != "fit" or is_partial_check(trainer) or not found:
            return
        step = trainer.global_step
        self.validations = [v for v in self.validations if v["step"] != step]
        self.validations.append({"step": step, **found})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock and draw."""
        self._seconds, self._started = self.seconds, None
        if _writes(trainer):
            self._draw(trainer)
        self._last = None

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

    # What it leaves.

    @property
    def seconds(self) -> float:
        """Time in `fit` since the run began, that of what was resumed from included."""
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def summary(self, trainer: Trainer) -> str:
        """The run in one line."""
        folder = folder_of(trainer)
        rounds = int(self.rounds[-1]["round"]) + 1 if self.rounds else 0
        completions = rollout_datamodule(trainer, self).counters["num_completions"]
        took = (
            f"{rounds} {'round' if rounds == 1 else 'rounds'}, {completions} completions, "
            f"{self.seconds:.0f} s"
        )
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"fast_dev_run: everything ran once ({took}); nothing was measured or written"
        return f"{_name_of(folder)}: {self._result()} ({took}); pictures and metrics in {folder}"

    def _result(self) -> str:
        measured = _measured(self.validations, "val/accuracy")
        rewards = _measured(self.rounds, "reward")
        if measured and measured[-1][0] > 0:
            return f"held-out accuracy {_from_to(measured)}"
        result = f"reward {_from_to(rewards)}" if rewards else "nothing trained"
        if measured:
            result = f"held-out accuracy {measured[0][1]:.2f} before training, {result}"
        return result

    def _rows(self, round: Round, names: Sequence[str]) -> list[dict[str, Any]]:
        pairs = [(g, c) for g in round.groups for c in g.completions][: self.num_completions]
        rows = [completion_row(round, group, completion, names) for group, completion in pairs]
        if renamed := {key for row in rows for key in row.pop(RENAMED)} - self._renamed:
            self._renamed |= renamed
            rank_zero_warn(
                f"In the table of completions, what reward functions log as {sorted(renamed)} is "
                "called `reward/...`: these names are columns of every table."
            )
        return rows

    def _log_table(self, trainer: Trainer, rows: Sequence[dict[str, Any]], step: int) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and rows:
                table = self._table(logger, [*rows[0]])
                for row in rows:
                    table.add_data(*(row.get(str(column)) for column in table.columns))
                logger.log_metrics({"completions": table}, step=step)  # type: ignore[dict-item]

    def _table(self, logger: WandbLogger, columns: list[str | int]) -> "wandb.Table":
        """The run's one table: W&B shows only the last of several under the same key."""
        import wandb

        run = logger.experiment
        if run not in self._tables:
            self._tables[run] = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        return self._tables[run]

    def _draw(self, trainer: Trainer) -> None:
        figures = {}
        if self.rounds:
            figures["learning"] = pictures.learning_curve(self.rounds, self.validations)
        if self._last is not None:
            figures["lengths"] = pictures.length_histogram(self._last)
            if self._last.trace is not None and self._last.trace.steps:
                figures["timeline"] = pictures.slot_timeline(self._last)
        for name, figure in figures.items():
            self._publish(trainer, name, figure)

    def _publish(self, trainer: Trainer, name: str, figure: "Figure") -> None:
        path = folder_of(trainer) / f"{name}.png"
        figure.savefig(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(f"pictures/{name}", [str(path)], step=trainer.global_step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(f"pictures/{name}", figure, trainer.global_step)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The run's curve and how long it took."""
        return {
            "rounds": [dict(r) for r in self.rounds],
            "validations": [dict(v) for v in self.validations],
            "seconds": self.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the curve of the run that is resumed."""
        self.rounds = state_dict["rounds"]
        self.validations = state_dict["validations"]
        self._seconds = state_dict["seconds"]


def _name_of(folder: Path) -> str:
    """What a run is called: `runs/countdown/version_3` is `countdown`."""
    folder = folder.resolve()
    return folder.parent.name if folder.name.startswith("version_") else folder.name


def _writes(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _measured(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(r["step"], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]


def _from_to(measured: Sequence[tuple[float, float]]) -> str:
    """From the untrained model's figure to the last; the last alone where that was not measured."""
    (step, first), (_, last) = measured[0], measured[-1]
    return f"{first:.2f} -> {last:.2f}" if step == 0 and len(measured) > 1 else f"{last:.2f}"


def _save_trace(round: Round, folder: Path) -> None:
    import pyarrow.parquet as pq

    assert round.trace is not None
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in round.trace.tables().items():
        pq.write_table(table, folder / f"round_{round.number:05}_{name}.parquet")
