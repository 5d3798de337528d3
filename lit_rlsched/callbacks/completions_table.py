"""Rows of the table of completions: what is in them, and the file that they are kept in."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.text import printable
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Prompt

if TYPE_CHECKING:
    import wandb

RENAMED = "renamed"
"""Key of the row under which stands what had to be renamed; not a column."""


class CompletionsTable:
    """Completions as rows, in a JSONL file and at W&B.

    Args:
        num_completions: Of a round, the first ones in the order of the plan.
    """

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self._renamed: set[str] = set()
        self._tables: dict[Any, wandb.Table] = {}

    def add(self, round: Round, names: Sequence[str], path: Path, loggers: Iterable[Any]) -> None:
        """Write a round's rows.

        Args:
            round: Drawn and scored.
            names: Of the reward functions.
            path: Of the file.
            loggers: The Trainer's.
        """
        rows = self._rows(round, names)
        append_rows(path, rows)
        for logger in loggers:
            if isinstance(logger, WandbLogger) and rows:
                table = self._table(logger, [*rows[0]])
                for row in rows:
                    table.add_data(*(row.get(str(column)) for column in table.columns))
                logger.log_metrics({"completions": table}, step=round.version)  # type: ignore[dict-item]

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

    def _table(self, logger: WandbLogger, columns: list[str | int]) -> "wandb.Table":
        """The run's one table: W&B shows only the last of several under the same key."""
        import wandb

        run = logger.experiment
        if run not in self._tables:
            self._tables[run] = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        return self._tables[run]


def completion_row(
    round: Round, group: Group, completion: Completion, names: Sequence[str]
) -> dict[str, Any]:
    """TRL's columns, then what reward functions have logged.

    A column of theirs that has the name of one of ours becomes `reward/NAME`.

    Args:
        round: The completion's.
        group: The completion's.
        completion: Of which the row is.
        names: Of the reward functions.
    """
    scores = dict(zip(names, completion.scores or [], strict=False))
    advantage = completion.advantage if math.isfinite(completion.advantage) else None
    before = {
        "step": round.version,
        "prompt": _as_text(group.prompt),
        "completion": completion.text,
    }
    after = {
        "advantage": advantage,
        "completion_length": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "round": round.number,
    }
    ours, taken = {*before, *after, RENAMED}, {*before, *after, RENAMED, *scores}
    row = {
        **before,
        **{_other(name, ours): value for name, value in scores.items()},
        **after,
        **{_other(name, taken): value for name, value in completion.extra.items()},
    }
    renamed = [n for n in scores if n in ours] + [n for n in completion.extra if n in taken]
    return {**printable(row), RENAMED: renamed}


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to the end of a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def drop_rows(path: Path, number: int) -> None:
    """Drop the rows of round `number` and later: of another run, or of rounds drawn once more.

    Lines that cannot be read are dropped too, with a warning.
    """
    kept: list[bytes] = []
    unreadable: list[int] = []
    if number and path.exists():
        with path.open("rb") as file:
            for index, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # a kill may have cut the last
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


def _other(name: str, taken: Iterable[str]) -> str:
    return f"reward/{name}" if name in taken else name


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt.text, str):
        return prompt.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.text)
