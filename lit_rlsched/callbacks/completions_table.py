"""Rows of the table of completions: what is in them, and the file that they are kept in."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.text import printable
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Prompt

RENAMED = "renamed"
"""Key of the row under which stands what had to be renamed; not a column."""


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
