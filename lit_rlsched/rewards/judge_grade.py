"""What the answer of a judge is worth."""

import re

from lit_rlsched.rewards.functions import Completion, text_of

SCORE_PATTERN = r"<score>\s*([-+]?\d+(?:\.\d+)?)\s*</score>"
MOST_CHARACTERS = 16
"""Characters of an answer for each of its `max_tokens`: an endpoint may not keep to those."""


class Unparsed(Exception):
    """The answer holds no score; the message says what it holds."""


class Grade:
    """Reads the grade in an answer; see `Judge` for which one counts.

    Args:
        owner: Class of the judge, for messages.
        pattern: Regular expression whose only group is the grade.
        score_range: Lowest and highest grade.
        max_tokens: Most tokens of an answer.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, owner: str, pattern: str, score_range: tuple[float, float], max_tokens: int
    ) -> None:
        lowest, highest = score_range
        if not -1e9 < lowest < highest < 1e9:
            raise ValueError(
                f"`{owner}(score_range={score_range!r})`: the first must be less than the "
                "second, such as [0, 10]."
            )
        if max_tokens < 1:
            raise ValueError(f"`{owner}(max_tokens={max_tokens!r})`: use 1 or more.")
        self._pattern = check_pattern(f"`{owner}(score_pattern={pattern!r})`", pattern)
        self._range = lowest, highest
        self.most_characters = MOST_CHARACTERS * max_tokens
        """Of an answer; a longer one has no grade."""

    def reward(self, answer: str, completion: Completion = "") -> float:
        """From 0 for the lowest grade to 1 for the highest.

        Args:
            answer: The judge's.
            completion: What was judged: a grade that it holds is a quotation, not the judge's.

        Raises:
            Unparsed: it holds no grade in the range, or only quoted ones.
        """
        if len(answer) > (most := self.most_characters):
            raise Unparsed(f"{len(answer)} characters, {most} are the most: {answer:.200}")
        grades = self._pattern.findall(answer)
        if not grades:
            raise Unparsed(f"no grade in {answer[-200:]!r}")
        quoted_ones = {_number(grade) for grade in self._marked_grades(text_of(completion))}
        found = [grade for grade in grades if _number(grade) not in quoted_ones]
        if not found:
            raise Unparsed(f"the grade {grades[-1]} also stands in what was graded: a quotation?")
        lowest, highest = self._range
        try:
            grade = float(found[-1])
        except ValueError:
            raise Unparsed(f"the grade {found[-1]!r} is no number") from None
        if not lowest <= grade <= highest:
            raise Unparsed(f"the grade {found[-1]} is not from {lowest:g} to {highest:g}")
        return (grade - lowest) / (highest - lowest)

    def _marked_grades(self, text: str) -> list[str]:
        """Grades in a text; numbers that nothing marks as grades are none."""
        found = self._pattern.finditer(text)
        return [match[1] for match in found if match[0].strip() != match[1]]


def _number(grade: str) -> float | str:
    try:
        return float(grade)
    except ValueError:
        return grade


def check_pattern(called: str, pattern: str) -> re.Pattern[str]:
    """The pattern, compiled.

    Raises:
        ValueError: it is no regular expression with one group.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{called} is no regular expression: {error}.") from error
    if compiled.groups != 1:
        raise ValueError(
            f"{called} has {compiled.groups} groups: exactly one, the grade, must stand in "
            "parentheses; write others as (?:...)."
        )
    return compiled
