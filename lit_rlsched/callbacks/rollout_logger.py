"""Output of a run for its reader: completions, the report and a one-line summary."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.run.run_config import wandb_loggers
from lit_rlsched.run.saving.run_folder import folder_of, leave, name_of, occupy, read_row
from lit_rlsched.run.saving.traces import about_run, intervals, tables_of
from lit_rlsched.run.switches import switches_of
from lit_rlsched.scheduling.trace_files import TraceWriter
from lit_rlsched.text import as_text, counted, printable
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Sample

REPORT_SHARE = 0.02
"""Most of the run's time that is spent on the report, before its end."""


def _cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns that any of the rows has, and the values of each row."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    chats = ("prompt", "completion")
    readable = [{**row, **{c: as_text(row[c] or "") for c in chats if c in row}} for row in rows]
    return columns, [[row.get(column) for column in columns] for row in readable]


def _row(
    round: Round, group: Group, completion: Completion, names: Sequence[str]
) -> dict[str, Any]:
    """Return TRL's columns and what reward functions logged, as `reward/NAME` if NAME is taken."""
    scores = dict(zip(names, completion.scores or [], strict=False))
    ours = {
        "step": round.version,
        "prompt": Sample(group, completion).prompt,
        "completion": completion.shown,
        "advantage": completion.advantage if math.isfinite(completion.advantage) else None,
        "completion_length": completion.drawn,
        "finish_reason": completion.finish_reason,
        "round": round.ordinal,
    }
    row: dict[str, Any] = {name: ours[name] for name in ("step", "prompt", "completion")}
    row |= {f"reward/{n}" if n in ours else n: score for n, score in scores.items()} | ours
    taken = ours.keys() | scores.keys()
    row |= {f"reward/{n}" if n in taken else n: value for n, value in completion.extra.items()}
    return printable(row)


def drop_rows(path: Path, number: int) -> None:
    """Delete rows of round `number` and later, and unreadable lines with a warning."""
    kept: list[bytes] = []
    unreadable: list[int] = []
    lines = path.read_bytes().splitlines(keepends=True) if number > 1 and path.exists() else []
    for index, line in enumerate(lines, start=1):
        try:
            if line.endswith(b"\n") and read_row(line)[0] < number:  # else a kill has cut it
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
    """Record what a run drew: completions and a report.

    The run's folder (`default_root_dir`, or without one a new folder `runs/version_N`) gets
    `report.html`, a page with charts, timelines and completions that needs no network, and
    `completions.jsonl`, with TRL's columns. The folder is locked during the run, and a run that is
    not resumed replaces these files. `WandbLogger` gets a table of completions, a histogram of
    their lengths, and the report at the end.

    See `docs/howto/wandb.md`.

    Args:
        num_completions: Completions to write per table: the first ones in the order of the plan, so
            that completions of a prompt are together.
        every_n_rounds: Rounds between two tables of completions.
        report_every_n_rounds: Rounds between two reports, each with the table for the loggers; the
            end of training always gets one.
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
        report_every_n_rounds: int = 20,
        save_trace: bool = True,
    ) -> None:
        self.num_completions, self.every_n_rounds = num_completions, every_n_rounds
        self.report_every_n_rounds, self.save_trace = report_every_n_rounds, save_trace
        self._begun = False
        self._rows: list[dict[str, Any]] = []  # the newest, which loggers do not have yet
        self._traces: TraceWriter | None = None
        self._next_report = 0.0
        self._occupied: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lock the folder; refuse one in use, and another data module than ours."""
        if stage == "fit":
            run_of(trainer, self)
            if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._occupied = folder_of(trainer)
                occupy(self._occupied)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Write the round's rows, trace and report."""
        if (folder := self._occupied) is None:  # another rank writes, or nobody
            return
        run = run_of(trainer, self)
        first, self._begun = not self._begun, True
        if first:  # what is there of this round and later is of another or an earlier run
            folder.mkdir(parents=True, exist_ok=True)
            drop_rows(folder / "completions.jsonl", round.ordinal)
            if self.save_trace:
                self._traces = TraceWriter(folder / "traces")
                with self._tracing():
                    self._traces.begin(round.ordinal, about_run(run))
        if round.number % self.every_n_rounds == 0:
            names = run.settings.rewards.names
            pairs = [(g, c) for g in round.groups for c in g.completions][: self.num_completions]
            self._rows = [_row(round, group, completion, names) for group, completion in pairs]
            with (folder / "completions.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows)
        lengths = [completion.drawn for completion in round.completions]
        _to_wandb(trainer, "completions/lengths", lambda wandb: wandb.Histogram(lengths))
        if self._traces is not None:
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            with self._tracing():
                self._traces.add(round.ordinal, tables_of(run, round, switches_of(callbacks)))
        reports = round.ordinal % self.report_every_n_rounds == 0
        if reports or first:  # whoever looks early sees whether answers look as they should
            self._publish_rows(trainer)
        if reports:
            self._report(trainer, going_on=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last report."""
        self._publish_rows(trainer)
        run = run_of(trainer, self)
        if self._traces is not None and run.timeline is not None and run.timeline.last is not None:
            with self._tracing():  # what came after the last round
                table = intervals(run.timeline.last, run.clock.at)
                self._traces.add(run.record.num_rounds + 1, {"intervals": table})
        self._report(trainer, going_on=False)
        self._begun, self._traces = False, None

    def _publish_rows(self, trainer: Trainer) -> None:
        """Send the newest rows to W&B, unless it has them."""
        columns, data = _cells(self._rows)
        if self._rows:
            # a reward function may log a number for one completion and text for another
            mixed = {"columns": columns, "data": data, "allow_mixed_types": True}
            _to_wandb(trainer, "completions", lambda wandb: wandb.Table(**mixed))
        self._rows = []

    def _report(self, trainer: Trainer, going_on: bool) -> None:
        """Write the page about the run; at the end W&B gets it too."""
        began = time.monotonic()
        if self._traces is None or (going_on and began < self._next_report):
            return
        from lit_rlsched.callbacks.report.collect import run_data
        from lit_rlsched.callbacks.report.page import FILE, write_report

        run, path = run_of(trainer, self), folder_of(trainer) / FILE
        try:
            ended = not going_on and not trainer.received_sigterm
            data = run_data(path.parent, run.facts if ended else None, run.record)
            write_report(path, [data], going_on)
            if not going_on:
                text = path.read_text(encoding="utf-8")
                _to_wandb(trainer, "report", lambda wandb: wandb.Html(text, inject=False))
        except Exception as error:  # a page is no reason to end a run
            rank_zero_warn(f"`{path}` was not written: {type(error).__name__}: {error}")
            return
        now = time.monotonic()
        self._next_report = now + (now - began) / REPORT_SHARE

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
        """Do the same: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")

    def summary(self, trainer: Trainer) -> str:
        """Return the run in one line."""
        run = run_of(trainer, self)
        rounds, completions = run.record.num_rounds, run.counters["num_completions"]
        took = f"{counted(rounds, 'round')}, {completions} completions, {run.clock.seconds:.0f} s"
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"fast_dev_run: everything ran once ({took}); nothing was measured or written"
        temperature = run.settings.evaluation.sampling.temperature
        folder, result = folder_of(trainer), run.record.result(temperature)
        return f"{name_of(folder)}: {result} ({took}); report and metrics in {folder}"


def _to_wandb(trainer: Trainer, name: str, make: Callable[[Any], Any]) -> None:
    """Send what `make` makes of the package `wandb` to each run there."""
    for logger in wandb_loggers(trainer):
        import wandb

        logger.log_metrics({name: make(wandb)}, step=trainer.global_step)
