"""Output of a run for its reader: completions, pictures and a one-line summary."""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.run.saving.run_folder import folder_of, leave, name_of, occupy, read_row
from lit_rlsched.run.saving.traces import RunTraces
from lit_rlsched.run.switches import switches_of
from lit_rlsched.run.wandb_runs import log_artifact
from lit_rlsched.text import as_text, counted, printable
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Sample

SHOWN_ROWS = 512
"""Most rows of the table at W&B, if that is more than two rounds: the newest round, and rounds in
equal steps before it."""
REPORT_SHARE = 0.02
"""Most of the run's time that is spent on the report, before its end."""
SHOWN_TEXT = 1000
"""Most characters of a cell in TensorBoard."""


class CompletionsTable:
    """Writes completions as rows: to a JSONL file, to W&B and TensorBoard."""

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self._shown: dict[int, list[dict[str, Any]]] = {}
        self._step = 1
        self._published = 0

    def begin(self, path: Path, number: int) -> None:
        """Continue the file before round `number`, without rows of that round and later."""
        drop_rows(path, number)
        self._shown, self._step, self._published = {}, 1, 0
        with path.open("rb") as file:
            for of, rows in groupby(map(read_row, file), itemgetter(0)):
                self._show(of, [row for _, row in rows])

    def add(self, round: Round, names: Sequence[str], path: Path) -> None:
        """Write the rows of a round."""
        pairs = [(g, c) for g in round.groups for c in g.completions][: self.num_completions]
        rows = [_row(round, group, completion, names) for group, completion in pairs]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if rows:
            self._show(round.ordinal, rows)

    def _show(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Keep a round for the loggers, and of earlier ones as many as they show."""
        while True:
            kept = {n: r for n, r in self._shown.items() if (n - 1) % self._step == 0}
            self._shown = kept | {number: rows}
            if len(self._shown) <= 2 or sum(map(len, self._shown.values())) <= SHOWN_ROWS:
                return
            self._step *= 2

    def publish(self, loggers: Iterable[Any], step: int) -> None:
        """Send the table to W&B, and its newest round to TensorBoard, unless they have it.

        W&B makes an artifact of each table, and shows only the newest.
        """
        newest = max(self._shown, default=0)
        if newest == self._published:
            return
        self._published = newest
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                rows = [row for number in sorted(self._shown) for row in self._shown[number]]
                columns, data = _cells(rows)
                # a reward function may log a number in one round and text in another
                table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
                logger.log_metrics({"completions": table}, step=step)
            elif isinstance(logger, TensorBoardLogger):
                text = _markdown(*_cells(self._shown[newest]))
                logger.experiment.add_text("completions", text, step)


def _cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns that any of the rows has, and the values of each row."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    chats = ("prompt", "completion")
    readable = [{**row, **{c: as_text(row[c] or "") for c in chats if c in row}} for row in rows]
    return columns, [[row.get(column) for column in columns] for row in readable]


def _markdown(columns: list[str], data: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *data]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)


def _markdown_cell(value: Any) -> str:
    """Return a value as text in which nothing is Markdown or HTML."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) > SHOWN_TEXT:
        text = f"{text[:SHOWN_TEXT]} … ({len(text):,} characters)"
    plain = (c if c.isalnum() or c in " -" else f"&#{ord(c)};" for c in text)
    return "".join(plain).replace("&#10;", "<br>")


def _row(
    round: Round, group: Group, completion: Completion, names: Sequence[str]
) -> dict[str, Any]:
    """Return TRL's columns and what reward functions logged, as `reward/NAME` if NAME is taken."""
    scores = dict(zip(names, completion.scores or [], strict=False))
    before = {
        "step": round.version,
        "prompt": Sample(group, completion).prompt,
        "completion": completion.shown,
    }
    after = {
        "advantage": completion.advantage if math.isfinite(completion.advantage) else None,
        "completion_length": completion.drawn,
        "finish_reason": completion.finish_reason,
        "round": round.ordinal,
    }
    ours = before.keys() | after.keys()
    taken = ours | scores.keys()
    row: dict[str, Any] = {
        **before,
        **{f"reward/{n}" if n in ours else n: score for n, score in scores.items()},
        **after,
        **{f"reward/{n}" if n in taken else n: value for n, value in completion.extra.items()},
    }
    return printable(row)


def drop_rows(path: Path, number: int) -> None:
    """Delete the rows of round `number` and later from the file.

    Unreadable lines are deleted too, with a warning.
    """
    kept: list[bytes] = []
    unreadable: list[int] = []
    if number > 1 and path.exists():
        with path.open("rb") as file:
            for index, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # the last line was cut by a kill
                try:
                    if read_row(line)[0] < number:
                        kept.append(line)
                except ValueError:
                    unreadable.append(index)
    if unreadable:
        rank_zero_warn(
            f"`{path}`: {len(unreadable)} of {len(kept) + len(unreadable)} lines are unreadable "
            f"and left out; the first is line {unreadable[0]}."
        )
    shortened = path.with_suffix(".tmp")
    shortened.write_bytes(b"".join(kept))
    os.replace(shortened, path)


class RolloutLogger(RolloutCallback):
    """Record what a run drew: tables of completions, pictures.

    The run's folder (`default_root_dir`, or without one a new folder `runs/version_N`) gets
    `report.html`, a page with charts, timelines and completions that needs no network;
    `completions.jsonl`, with TRL's columns; `learning.png`, reward and held-out accuracy; and
    `timeline.png` and `lengths.png` of the latest round. The folder is locked during the run, and a
    run that is not resumed replaces these files. `WandbLogger` and `TensorBoardLogger` get the
    pictures and a table of completions.

    See `docs/howto/wandb.md`.

    Args:
        num_completions: Completions to write per table: the first ones in the order of the plan, so
            that completions of a prompt are together.
        every_n_rounds: Rounds between two tables of completions.
        pictures_every_n_rounds: Rounds between two sets of pictures, each with a new `report.html`;
            the end of training always gets one.
        save_trace: Whether to keep what ran when as Parquet files in `traces/`, for the report and
            `lit-rlsched simulate`; the newest 256 MiB. Without it there is no report.

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
        save_trace: bool = True,
    ) -> None:
        self.every_n_rounds = every_n_rounds
        self.pictures_every_n_rounds = pictures_every_n_rounds
        self.save_trace = save_trace
        self.table = CompletionsTable(num_completions)
        self._last: Round | None = None
        self._traces: RunTraces | None = None
        self._next_report = 0.0
        self._occupied: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lock the folder.

        Raises:
            FolderInUse: another process uses the run's folder.
            UsageError: there is no `RolloutDataModule`.
        """
        if stage == "fit":
            run_of(trainer, self)
            if _writes(trainer):
                self._occupied = folder_of(trainer)
                occupy(self._occupied)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Write the round's rows, trace and pictures."""
        first, self._last = self._last is None, round
        if not _writes(trainer):
            return
        folder = folder_of(trainer)
        if first:
            self._begin(trainer, folder, round.ordinal)
        if round.number % self.every_n_rounds == 0:
            names = run_of(trainer, self).settings.rewards.names
            self.table.add(round, names, folder / "completions.jsonl")
        if self._traces is not None:
            with self._tracing():
                self._traces.add(round)
        if round.ordinal % self.pictures_every_n_rounds == 0:
            self._draw(trainer)
            self._report(trainer, going_on=True)
        elif first:  # whoever looks early sees whether answers look as they should
            self.table.publish(trainer.loggers, trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the pictures."""
        if _writes(trainer):
            self._draw(trainer)
        if self._traces is not None:
            with self._tracing():
                self._traces.end()
        self._report(trainer, going_on=False)
        self._last = self._traces = None

    def _report(self, trainer: Trainer, going_on: bool) -> None:
        """Write the page about the run; at the end W&B gets it too."""
        began = time.monotonic()
        if self._traces is None or (going_on and began < self._next_report):
            return
        from lit_rlsched.callbacks import report  # imports matplotlib

        run, folder = run_of(trainer, self), folder_of(trainer)
        try:
            ended = not going_on and not trainer.received_sigterm
            data = report.run_data(folder, run.facts if ended else None, run.record)
            page = report.write_report(folder / report.FILE, [data], going_on)
            if not going_on:
                log_artifact(trainer, "report", "report", page)
        except Exception as error:  # a page is no reason to end a run
            told = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"`{folder / report.FILE}` was not written: {told}")
            return
        now = time.monotonic()
        self._next_report = now + (now - began) / REPORT_SHARE

    def _draw(self, trainer: Trainer) -> None:
        from lit_rlsched.callbacks import pictures  # imports matplotlib

        name = name_of(folder_of(trainer))
        record = run_of(trainer, self).record
        pictures.publish(pictures.draw(record, self._last, name), trainer)
        self.table.publish(trainer.loggers, trainer.global_step)

    def _begin(self, trainer: Trainer, folder: Path, number: int) -> None:
        """Delete what the folder has of round `number` and later, of another or an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        self.table.begin(folder / "completions.jsonl", number)
        if self.save_trace:
            run = run_of(trainer, self)
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            self._traces = RunTraces(run, folder / "traces", switches_of(callbacks))
            with self._tracing():
                self._traces.begin(number)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Stop writing traces, with a warning, where they cannot be written."""
        import pyarrow as pa

        try:
            yield
        except (OSError, pa.ArrowException) as error:
            self._traces = None
            rank_zero_warn(f"No traces and no report are written any more: {error}")

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
        run = run_of(trainer, self)
        rounds, completions = run.record.num_rounds, run.counters["num_completions"]
        took = f"{counted(rounds, 'round')}, {completions} completions, {run.clock.seconds:.0f} s"
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"fast_dev_run: everything ran once ({took}); nothing was measured or written"
        temperature = run.settings.evaluation.sampling.temperature
        folder, result = folder_of(trainer), run.record.result(temperature)
        return f"{name_of(folder)}: {result} ({took}); pictures and metrics in {folder}"


def _writes(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
