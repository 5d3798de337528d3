"""The table of completions: its rows, its file, and its copy at W&B."""

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


class CompletionsTable:
    """Writes completions as rows: to a JSONL file, to a table at W&B.

    Args:
        num_completions: Rows per round: the first completions in the order of the plan.
    """

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self._tables: dict[Any, wandb.Table] = {}

    def add(self, round: Round, names: Sequence[str], path: Path, loggers: Iterable[Any]) -> None:
        """Write the rows of a round.

        Args:
            round: Drawn and scored round.
            names: Names of the reward functions.
            path: File to append to.
            loggers: Loggers of the Trainer, of which each `WandbLogger` gets the rows.
        """
        pairs = [(g, c) for g in round.groups for c in g.completions][: self.num_completions]
        rows = [_row(round, group, completion, names) for group, completion in pairs]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for logger in loggers:
            if isinstance(logger, WandbLogger) and rows:
                table = self._table(logger, [*rows[0]])
                for row in rows:
                    table.add_data(*(row.get(str(column)) for column in table.columns))
                logger.log_metrics({"completions": table}, step=round.version)

    def _table(self, logger: WandbLogger, columns: list[str | int]) -> "wandb.Table":
        """Return the run's only table: W&B shows only the last of several under one key."""
        import wandb

        run = logger.experiment
        if run not in self._tables:
            self._tables[run] = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        return self._tables[run]


def _row(
    round: Round, group: Group, completion: Completion, names: Sequence[str]
) -> dict[str, Any]:
    """Return TRL's columns and what reward functions logged, as `reward/NAME` if NAME is taken."""
    scores = dict(zip(names, completion.scores or [], strict=False))
    before = {
        "step": round.version,
        "prompt": _as_text(group.prompt),
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


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt.text, str):
        return prompt.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.text)


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
