"""Ready-made reward functions with TRL's signature. Verifiers are imported on first use."""

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from lit_rlsched.rewards.answers import (
    Entry,
    Review,
    checked_entry,
    import_reasoning_gym,
    review_of,
    score_entry,
)
from lit_rlsched.rewards.golds import (
    check_gold,
    choice_of,
    decimals,
    find_answer,
    read_gold,
    time_limit,
)
from lit_rlsched.settings import UsageError

Completion = str | list[dict[str, Any]]


def text_of(completion: Completion) -> str:
    """Return the text of a completion, or of its last turn; none if a tool has the last word."""
    if isinstance(completion, str):
        return completion
    last = completion[-1]
    return str(last["content"]) if last.get("role", "assistant") == "assistant" else ""


def extract_answer(completion: Completion) -> str | None:
    """Return the content of the last `<answer>...</answer>`, as reasoning-gym finds it.

    The library's regular expression takes quadratic time if many tags are opened and none closed.
    """
    text, answer, at = text_of(completion), None, 0
    while (start := text.find("<answer>", at)) >= 0:
        start += len("<answer>")
        if (end := text.find("</answer>", start)) < 0:
            break
        answer, at = text[start:end].strip(), end + len("</answer>")
    return answer


def reasoning_gym_reward(
    completions: Sequence[Completion],
    *,
    task: Sequence[str],
    metadata: Sequence[Mapping[str, Any] | str],
    answer: Sequence[str | None] | None = None,
    question: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Score the content of `<answer>...</answer>` as the reasoning-gym data set does.

    No text of a model or a row is run: data sets whose verifier would do so are refused
    (`lit_rlsched.rewards.answers`). An answer of the wrong form scores like a missing one.
    """
    rows = len(completions)
    golds, questions = answer or [None] * rows, question or [""] * rows
    given = zip(completions, task, metadata, golds, questions, strict=True)
    return [
        score_entry(name, extract_answer(completion), checked_entry(name, review_of(name), *row))
        for completion, name, *row in given
    ]


def check_reasoning_gym_row(columns: Mapping[str, Any]) -> None:
    """Refuse a row that `reasoning_gym_reward` would not score."""
    if missing := {"task", "metadata"} - columns.keys():
        raise UsageError(
            f"there is no column {sorted(missing)}. `reasoning_gym_reward` needs `task` (the data "
            "set's name), `metadata` and `answer`, as `ReasoningGym` makes them."
        )
    task = columns["task"]
    checked_entry(task, review_of(task), columns["metadata"], columns.get("answer"))


reasoning_gym_reward.warm_up = import_reasoning_gym  # type: ignore[attr-defined]
reasoning_gym_reward.check_row = check_reasoning_gym_row  # type: ignore[attr-defined]


_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/()]")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def work_out(text: str) -> Fraction:
    """Return the value of a formula of numbers, `+ - * /` and parentheses, exactly.

    `eval` and SymPy's parser run their text as Python. Anything else raises `ValueError` here.
    """
    if re.sub(r"[ \t\r\n]+", "", _TOKEN.sub("", text)):
        raise ValueError(f"not a formula: {text[:80]!r}")
    tokens = [*_TOKEN.findall(text), ""]

    def operand() -> Fraction:
        token = tokens.pop(0)
        if token == "(":
            value = terms(("+", "-"))
            if tokens.pop(0) != ")":
                raise ValueError(f"no closing parenthesis in {text[:80]!r}")
            return value
        if token in ("+", "-"):
            return operand() if token == "+" else -operand()
        return Fraction(token)  # raises a ValueError if it is no number

    def terms(symbols: tuple[str, str]) -> Fraction:
        one = functools.partial(terms, ("*", "/")) if symbols == ("+", "-") else operand
        value = one()
        while tokens[0] in symbols:
            value = _OPERATORS[tokens.pop(0)](value, one())
        return value

    value = terms(("+", "-"))
    if tokens != [""]:
        raise ValueError(f"not a formula from {tokens[0]!r} on: {text[:80]!r}")
    return value


def _check_puzzle(entry: Entry) -> None:
    for name in ("numbers", "target"):
        value = entry["metadata"][name]
        for number in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(number, int) or abs(number) > 1e9:
                raise ValueError(f"`metadata.{name}` has {number!r:.80}")


_PUZZLE = Review(longest=64, columns=_check_puzzle, needs_answer=False)


def _solves(answer: str, puzzle: Mapping[str, Any]) -> bool:
    """Whether a formula uses each number of a puzzle once and has its target as the value."""
    try:
        value = float(work_out(answer))
    except (ValueError, ArithmeticError):
        return False
    used = sorted(int(number) for number in re.findall(r"\b[0-9]+\b", answer))
    target = puzzle["target"]
    near = abs(value - target) <= 1e-6 + 1e-5 * abs(target)
    return near and used == sorted(puzzle["numbers"])


def countdown_reward(
    completions: Sequence[Completion],
    *,
    metadata: Sequence[Mapping[str, Any] | str],
    finish_reasons: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Return 1 if `<answer>` is arithmetic that uses each number once and hits the target, else 0.

    Args:
        completions: Completions, as text or chat messages. One cut at the length limit scores 0.
        metadata: `metadata` of reasoning-gym's countdown entry: `numbers` and `target`.
        finish_reasons: `length` for a completion cut at the limit.
        **kwargs: Ignored.
    """
    scores = []
    for completion, facts, reason in zip(
        completions, metadata, finish_reasons or [None] * len(completions), strict=True
    ):
        answer = extract_answer(completion)
        puzzle = checked_entry("countdown", _PUZZLE, facts)["metadata"]
        solved = answer is not None and _PUZZLE.admits(answer) and _solves(answer, puzzle)
        scores.append(float(solved and reason != "length"))
    return scores


def check_countdown_row(columns: Mapping[str, Any]) -> None:
    """Refuse a row that `countdown_reward` would not score."""
    checked_entry("countdown", _PUZZLE, columns.get("metadata"))


countdown_reward.check_row = check_countdown_row  # type: ignore[attr-defined]


@functools.cache
def import_math_verify() -> Any:
    """Import math-verify, and let it import what it needs."""
    import math_verify

    math_verify.verify(math_verify.parse("$1$"), math_verify.parse("$1$"))
    return math_verify


def math_verify_reward(
    completions: Sequence[Completion],
    *,
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    log_failure: Callable[[str, str], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""Return 1 if math-verify finds the completion equal to the gold answer, else 0.

    The whole gold counts: with the gold `7\sqrt{11}` the answer 7 is wrong. As math-verify does,
    units, percent signs and a variable before the answer (`x=5`) are left out.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise UsageError("`math_verify_reward` needs a column `answer` or `solution`.")
    scores: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        try:
            wanted, letter = read_gold(gold), choice_of(gold)
            correct = import_math_verify().verify(
                [*wanted, letter] if letter else wanted,
                find_answer(text_of(completion), choice=letter is not None),
                float_rounding=decimals(gold),
                timeout_seconds=time_limit(),
            )
            scores.append(float(correct))
        except ValueError as error:
            scores.append(None)
            if log_failure is not None:
                log_failure("unparsed", f"the gold answer {gold!r:.200}: {error}")
    return scores


def check_math_verify_row(columns: Mapping[str, Any]) -> None:
    """Refuse a row whose gold answer `math_verify_reward` would not read as a whole."""
    golds = [columns[name] for name in ("answer", "solution") if name in columns]
    if not golds:
        raise UsageError("there is no column `answer` or `solution`.")
    check_gold(golds[0])


math_verify_reward.warm_up = import_math_verify  # type: ignore[attr-defined]
math_verify_reward.check_row = check_math_verify_row  # type: ignore[attr-defined]


class SoftOverlongPunishment:
    """DAPO's length penalty (eq. 13): 0 for short completions, falling linearly to -1."""

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_length: int, soft_punish_cache: int) -> None:
        if not 0 < soft_punish_cache <= max_completion_length:
            raise UsageError(
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
