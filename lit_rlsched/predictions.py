"""What `predict` makes of completions: rows of a table."""

from collections.abc import Sequence
from typing import Any

from lit_rlsched.evaluation import Evaluated
from lit_rlsched.types import Completion, Group


def prediction_rows(evaluated: Evaluated, reward_funcs: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each completion of a prompt, the greedy one first.

    Args:
        evaluated: The prompt with its completions.
        reward_funcs: Names of the reward functions.

    Returns:
        Rows with the prompt's own columns, `uid`, `prompt`, `completion`, `temperature` (0: drawn
        greedily), `completion_length`, `finish_reason`, and a column for each reward function where
        the completion was scored. A column of the prompt that has such a name is `input_NAME`.
    """
    groups = [g for g in (evaluated.greedy, evaluated.sampled) if g is not None]
    return [_row(g, c, reward_funcs) for g in groups for c in g.completions]


def _row(group: Group, completion: Completion, reward_funcs: Sequence[str]) -> dict[str, Any]:
    row = {
        "uid": group.prompt.uid,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "temperature": group.sampling.temperature,
        "completion_length": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        **dict(zip(reward_funcs, completion.scores or [], strict=False)),
    }
    columns = group.prompt.columns.items()
    return row | {f"input_{name}" if name in row else name: value for name, value in columns}
