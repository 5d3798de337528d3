"""Reward functions ready to use, called as TRL calls them. Verifiers are imported on first use."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lit_rlsched.rewards.answers import checked_entry, import_reasoning_gym, score_entry

Completion = str | list[dict[str, str]]
Function = TypeVar("Function", bound=Callable[..., Any])


def warmed_up_by(warm_up: Callable[[], object]) -> Callable[[Function], Function]:
    """Mark a reward function: each worker calls `warm_up` before the first time-out counts."""

    def mark(function: Function) -> Function:
        function.warm_up = warm_up  # type: ignore[attr-defined]
        return function

    return mark


def checks_rows_by(check: Callable[[Mapping[str, Any]], object]) -> Callable[[Function], Function]:
    """Mark a reward function: `check` sees each row's columns before anything is started."""

    def mark(function: Function) -> Function:
        function.check_row = check  # type: ignore[attr-defined]
        return function

    return mark


def text_of(completion: Completion) -> str:
    """The completion as a string, whether the prompt was one or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(completion: Completion) -> str | None:
    """What stands in the last `<answer>...</answer>`, as reasoning-gym finds it.

    Its own regular expression takes quadratic time where many are opened and none is closed.
    """
    text, answer, at = text_of(completion), None, 0
    while (start := text.find("<answer>", at)) >= 0:
        start += len("<answer>")
        if (end := text.find("</answer>", start)) < 0:
            break
        answer, at = text[start:end].strip(), end + len("</answer>")
    return answer


def check_reasoning_gym_row(columns: Mapping[str, Any]) -> None:
    """Refuse a row that `reasoning_gym_reward` would not score.

    Raises:
        ValueError: its data set was not reviewed, or a column is not what it must be.
    """
    if missing := {"task", "metadata"} - columns.keys():
        raise ValueError(
            f"there is no column {sorted(missing)}. `reasoning_gym_reward` needs `task` (the data "
            "set's name), `metadata` and `answer`, as `ReasoningGym` makes them."
        )
    checked_entry(columns["task"], columns["metadata"], columns.get("answer"), None)


@checks_rows_by(check_reasoning_gym_row)
@warmed_up_by(import_reasoning_gym)
def reasoning_gym_reward(
    completions: Sequence[Completion],
    *,
    task: Sequence[str],
    metadata: Sequence[Mapping[str, Any] | str],
    answer: Sequence[str | None] | None = None,
    question: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float]:
    """The score the reasoning-gym data set itself gives to what stands in `<answer>...</answer>`.

    Nothing that a model or a row wrote is run: where the data set's verifier would evaluate it, one
    of ours reads it instead (`lit_rlsched.rewards.answers`). An answer that is not of the data
    set's kind is scored as if it were missing.

    Args:
        completions: Completions, as text or chat messages.
        task: Name of the data set, such as `countdown`.
        metadata: `metadata` of the entry, as a dict or as JSON.
        answer: `answer` of the entry.
        question: `question` of the entry.
        **kwargs: Ignored.

    Raises:
        ValueError: the data set was not reviewed, or a column is not what it must be.
    """
    rows = len(completions)
    return [
        score_entry(name, extract_answer(completion), checked_entry(name, facts, gold, text))
        for completion, name, facts, gold, text in zip(
            completions,
            task,
            metadata,
            answer or [None] * rows,
            question or [""] * rows,
            strict=True,
        )
    ]


def countdown_reward(
    completions: Sequence[Completion],
    *,
    metadata: Sequence[Mapping[str, Any] | str],
    finish_reasons: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """1 where `<answer>` is arithmetic that uses all numbers once and hits the target, else 0.

    Args:
        completions: Completions, as text or chat messages. One cut at the limit scores 0.
        metadata: `metadata` of reasoning-gym's countdown entry: `numbers` and `target`.
        finish_reasons: `length` for a completion cut at the limit.
        **kwargs: Ignored.
    """
    scores = []
    for completion, facts, reason in zip(
        completions, metadata, finish_reasons or [None] * len(completions), strict=True
    ):
        answer = extract_answer(completion)
        plain = answer is not None and len(answer) <= 64 and "**" not in answer
        entry = checked_entry("countdown", facts, None, None)
        solved = plain and score_entry("countdown", answer, entry) >= 0.999
        scores.append(float(solved and reason != "length"))
    return scores


@functools.cache
def import_math_verify() -> Any:
    import math_verify

    math_verify.verify(math_verify.parse("$1$"), math_verify.parse("$1$"))
    return math_verify


@warmed_up_by(import_math_verify)
def math_verify_reward(
    completions: Sequence[Completion],
    *,
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1 where math-verify finds the completion equal to the gold answer, else 0.

    Args:
        completions: Completions, as text or chat messages; what is boxed counts first.
        answer: Gold answers. None is returned for one that cannot be parsed.
        solution: The same under TRL's name, where there is no column `answer`.
        **kwargs: Ignored.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise ValueError("`math_verify_reward` needs a column `answer` or `solution`.")
    mv = import_math_verify()
    # its own limits are alarm signals, which only the main thread can have
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    targets = [mv.LatexExtractionConfig(boxed_match_priority=0), mv.ExprExtractionConfig()]
    scores: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        parsed = mv.parse(str(gold), parsing_timeout=limit)
        if not parsed:
            scores.append(None)
            continue
        given = mv.parse(text_of(completion), extraction_config=targets, parsing_timeout=limit)
        scores.append(float(mv.verify(parsed, given, timeout_seconds=limit)))
    return scores


class SoftOverlongPunishment:
    """DAPO's length penalty (eq. 13): 0, falling linearly to -1 over the last tokens allowed.

    Args:
        max_completion_length: Length at which the penalty reaches -1.
        soft_punish_cache: Number of tokens before that over which it falls.
    """

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_length: int, soft_punish_cache: int) -> None:
        if not 0 < soft_punish_cache <= max_completion_length:
            raise ValueError(
                f"`soft_punish_cache={soft_punish_cache}` must be between 1 and "
                f"`max_completion_length={max_completion_length}`."
            )
        self.max_completion_length = max_completion_length
        self.soft_punish_cache = soft_punish_cache

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        free = self.max_completion_length - self.soft_punish_cache
        return [
            min(0.0, max(-1.0, (free - len(ids)) / self.soft_punish_cache))
            for ids in completion_ids
        ]
