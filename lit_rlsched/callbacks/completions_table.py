"""The table of completions: its rows, its file, and what loggers show of it."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.text import printable
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group

SHOWN_ROWS = 512
"""Most rows of the table at W&B, if that is more than two rounds: the newest round, and rounds in
equal steps before it."""
SHOWN_TEXT = 1000
"""Most characters of a cell in TensorBoard."""


class CompletionsTable:
    """Writes completions as rows: to a JSONL file, to W&B and TensorBoard.

    Args:
        num_completions: Rows per round: the first completions in the order of the plan.
    """

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self._shown: dict[int, list[dict[str, Any]]] = {}
        self._step = 1
        self._published = 0

    def begin(self, path: Path, number: int) -> None:
        """Continue the file before round `number`, without rows of that round and later."""
        drop_rows(path, number)
        self._shown, self._step, self._published = {}, 1, 0
        with path.open(encoding="utf-8") as file:
            for of, rows in groupby(map(json.loads, file), lambda row: int(row["round"])):
                self._show(of, [*rows])

    def add(self, round: Round, names: Sequence[str], path: Path) -> None:
        """Write the rows of a round.

        Args:
            round: Drawn and scored round.
            names: Names of the reward functions.
            path: File to append to.
        """
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
    readable = [{**row, "prompt": _as_text(row.get("prompt") or "")} for row in rows]
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
        "prompt": group.prompt.text,
        "completion": completion.text,
    }
    after = {
        "advantage": completion.advantage if math.isfinite(completion.advantage) else None,
        "completion_length": len(completion.token_ids),
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


def _as_text(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


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
                    if int(json.loads(line)["round"]) < number:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    unreadable.append(index)
    if unreadable:
        rank_zero_warn(
            f"`{path}`: {len(unreadable)} of {len(kept) + len(unreadable)} lines are unreadable "
            f"and left out; the first is line {unreadable[0]}."
        )
    shortened = path.with_suffix(".tmp")
    shortened.write_bytes(b"".join(kept))
    os.replace(shortened, path)
