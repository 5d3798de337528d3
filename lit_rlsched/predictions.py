"""Rows of the table that `predict` returns."""

from collections.abc import Sequence
from typing import Any

from lit_rlsched.evaluation import Evaluated


def prediction_rows(evaluated: Evaluated, reward_funcs: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each completion of a prompt, the greedy one first.

    Args:
        evaluated: Prompt with its completions.
        reward_funcs: Names of the reward functions.

    Returns:
        Rows with the columns `uid`, `prompt`, `completion`, `temperature` (0 for greedy decoding),
        `completion_length`, `finish_reason`, one per reward function if the completion was scored,
        and the prompt's own. A column of the prompt with one of these names becomes `input_NAME`.
    """
    rows = []
    for group in (g for g in (evaluated.greedy, evaluated.sampled) if g is not None):
        for completion in group.completions:
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
            rows.append(row | {f"input_{k}" if k in row else k: value for k, value in columns})
    return rows
