r"""Gold answers of `math_verify_reward`: each is read as a whole, or refused.

math-verify looks for an answer in a text. Given the bare gold `7\sqrt{11}` it finds 7, so this
module puts a gold into `\boxed{...}`, which math-verify reads whole. A gold that it misreads even
there is refused.
"""

import functools
import itertools
import numbers
import re
import threading
from decimal import Decimal
from typing import Any

from lit_rlsched.settings import UsageError

LONGEST = 1000
"""Maximum number of characters in a gold answer."""
CHOICES = tuple("ABCDEFGHIJ")
"""Letters of multiple-choice answers, which are also found in `Answer: B` without LaTeX."""

_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$")
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d{1,4}")
_NOT_LETTERS = re.compile(
    r"\\(?:text\w*|math\w+|operatorname|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_WORD = re.compile(
    r"[A-Za-z]{4,}|(?<=\s)[A-Za-z]{2,}|(?<![A-Za-z])(?:pi|sin|cos|tan|log|ln|exp|sqrt)(?![A-Za-z])"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_SIMPLE = re.compile(
    r"-?(?:\d+(?:\.\d+)?|\d{1,3}(?:,\d{3})+|\d*\\sqrt\{\d+\}|\d*\\pi"
    r"|\\[dt]?frac\{-?\d+\}\{[1-9]\d*\}|\d+/[1-9]\d*)"
)
"""Numbers, fractions and roots: math-verify is certain to read them as a whole."""
_MISREAD = {
    "two numbers side by side": re.compile(r"\d\.?(?:\s|\\[ ,;:]|\\q?quad)+\.?\d"),
    "a number with a subscript": re.compile(r"\d[)}\s]*_"),
}
"""Texts that math-verify reads only in part: `1 1/2` as 1, `7 8` as 15, `12_8` as 12."""


def answer_of(gold: object) -> str:
    r"""Return the answer that a gold states, without delimiters."""
    if isinstance(gold, numbers.Rational) and not isinstance(gold, bool):
        return str(gold)
    if isinstance(gold, numbers.Real | Decimal) and not isinstance(gold, bool):
        return _digits(str(gold))
    if not isinstance(gold, str):
        raise UsageError(f"it is a {type(gold).__name__}, neither text nor a number")
    text = gold.rpartition("####")[2]
    if r"\boxed" in text or r"\fbox" in text:
        from latex2sympy2_extended.math_normalization import extract_boxed_content

        text = extract_boxed_content(text, "last")  # as math-verify does with a completion
    text = _DELIMITERS.sub(" ", text).strip().rstrip(".").strip()
    if not text:
        raise UsageError("it is empty")
    if len(text) > LONGEST:
        raise UsageError(f"it has {len(text)} characters, more than {LONGEST}")
    depths = [*itertools.accumulate((letter == "{") - (letter == "}") for letter in text)]
    if min(depths) < 0 or depths[-1]:
        raise UsageError("its braces do not match")
    return _digits(text) if _SCIENTIFIC.fullmatch(text) else text


def _digits(number: str) -> str:
    value = Decimal(number)
    if not value.is_finite():
        raise UsageError("it is not finite")
    if abs(value.adjusted()) > LONGEST:
        raise UsageError(f"it has more than {LONGEST} digits")
    return f"{value:f}"


def _forms(answer: str) -> list[str]:
    """Return the ways to write an answer in LaTeX; refuse one of which math-verify reads a part."""
    from latex2sympy2_extended import normalize_latex
    from math_verify import LatexExtractionConfig

    if _WORDS.fullmatch(answer):
        return [rf"\text{{{answer}}}", answer]
    # without units, percent signs and the like
    plain = normalize_latex(answer, LatexExtractionConfig().normalization_config)
    if found := _WORD.search(_NOT_LETTERS.sub(" ", f" {plain}")):
        raise UsageError(
            f"it has the word `{found[0]}`, which would be read as a product of letters. Write "
            r"words as `\text{...}`, functions and constants as `\sin` or `\pi`"
        )
    for what, pattern in _MISREAD.items():
        if pattern.search(plain):
            raise UsageError(f"it has {what}, which math-verify does not read as one answer")
    return [answer]


def read_gold(gold: object) -> list[Any]:
    """Return all forms of a gold answer, as `math_verify.verify` takes them."""
    answer = answer_of(gold)
    text = str(gold).strip()
    return _read(answer, text if len(text) <= LONGEST else answer)


@functools.lru_cache(maxsize=4096)
def _read(answer: str, text: str) -> list[Any]:
    found: list[Any] = []
    for form in _forms(answer):
        parsed = _boxed(form)
        if not parsed or isinstance(parsed[0], str):
            raise UsageError(f"math-verify cannot read {answer[:80]!r}")
        if _lost(parsed[0], parsed[-1]):
            raise UsageError(f"{answer[:80]!r} has no value, or equal elements that become one")
        found += parsed
    from math_verify import verify

    given = find_answer(rf"\boxed{{{answer}}}")
    if not verify(found, given, timeout_seconds=time_limit()):
        raise UsageError(f"math-verify reads {answer[:80]!r} otherwise in a completion")
    if text != answer:
        found += _boxed(text)[-1:]  # as text, for a completion that repeats the gold
    return found


def find_answer(text: str, choice: bool = False) -> list[Any]:
    """Return the answer of a completion, as math-verify finds it."""
    import math_verify as mv

    targets = [mv.LatexExtractionConfig(boxed_match_priority=0), mv.ExprExtractionConfig()]
    if choice:
        targets.append(mv.StringExtractionConfig(CHOICES, False, lowercase=False))
    return mv.parse(text, extraction_config=targets, parsing_timeout=time_limit())


def choice_of(gold: object) -> str | None:
    r"""Return the letter of a gold answer such as `B`, `(B)` or `\text{(B)}`."""
    letter = re.sub(r"\\text(?:bf)?|[(){}]", "", answer_of(gold))
    return letter if letter in CHOICES else None


def _boxed(latex: str) -> list[Any]:
    import math_verify as mv

    config = mv.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    return mv.parse(rf"\boxed{{{latex}}}", extraction_config=[config], parsing_timeout=time_limit())


def _lost(value: Any, text: str) -> bool:
    """Whether a value is undefined, or a list such as `3,3`, `[3,3]` or `(5,2]` has collapsed."""
    import sympy

    if isinstance(value, sympy.FiniteSet | type(sympy.EmptySet)):
        return len(value) < 2 and re.search("[,;]", text) is not None
    if isinstance(value, sympy.Expr) and value not in (sympy.oo, -sympy.oo):
        return value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
    return False


def time_limit() -> int | None:
    """Seconds for each call of math-verify; None in a thread, as its limits are alarm signals."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def decimals(gold: object) -> int:
    """Return to how many decimals floating-point answers are compared: 6, or all of the gold's."""
    return max([6, *map(len, re.findall(r"\.(\d+)", answer_of(gold)))])


def check_gold(gold: object) -> None:
    """Refuse a gold answer that cannot be read as a whole."""
    try:
        if not _SIMPLE.fullmatch(answer_of(gold)):  # the parser takes from 5 to 200 ms
            read_gold(gold)
    except ValueError as error:
        raise UsageError(
            f"the gold answer {gold!r:.200} cannot be scored: {error}. Give a number or one answer "
            r"in LaTeX, such as `7\sqrt{11}`, alone or at the end of a worked solution in "
            r"`\boxed{...}` or after `####`; or drop the row."
        ) from None
