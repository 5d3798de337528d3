"""Reader of arithmetic that neither compiles nor runs it.

`eval` and SymPy's parser run their text as Python. This reader knows numbers and the operators
`+ - * / ** << >>`; anything else raises `ValueError`. The length and depth of a formula and the
size of its numbers are bounded, so that none takes long.
"""

import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 2000
"""Maximum number of characters in a formula."""
DEEPEST = 50
"""Maximum nesting of parentheses, powers of powers and signs in a row."""
MAX_BITS = 8192
"""Maximum size of a number's numerator and denominator."""
MAX_POWER = 1000
MAX_SHIFT = 64

_TOKEN = re.compile(
    r"(0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\*\*|<<|>>|[-+*/()])|[ \t\r\n]+"
)
_NUMBER = 1
_BINDING = {"<<": 1, ">>": 1, "+": 2, "-": 2, "*": 3, "/": 3, "**": 5}
_SIGN_BINDING = 4


def _sized(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"a number exceeds {MAX_BITS} bits")
    return value


def _number(text: str) -> Fraction:
    return _sized(Fraction(int(text, 16) if text[:2] in ("0x", "0X") else text))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_POWER:
        raise ValueError(f"the exponent {exponent} is not a whole number up to {MAX_POWER}")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS:
        raise ValueError(f"a number exceeds {MAX_BITS} bits")
    return Fraction(base ** int(exponent))


def _shift(function: Callable[[int, int], int]) -> Callable[[Fraction, Fraction], Fraction]:
    def shifted(value: Fraction, by: Fraction) -> Fraction:
        if value.denominator != 1 or by.denominator != 1 or not 0 <= by <= MAX_SHIFT:
            raise ValueError(f"the shift {by} is not a whole number up to {MAX_SHIFT}")
        return Fraction(function(int(value), int(by)))

    return shifted


_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": _power,
    "<<": _shift(operator.lshift),
    ">>": _shift(operator.rshift),
}


def work_out(text: str) -> Fraction:
    """Return the value of a formula, exactly."""
    try:
        return _Reader(text).value()
    except ArithmeticError as error:  # a division by zero, an overflow
        raise ValueError(f"{text[:80]!r}: {error}") from None


def _tokens(text: str) -> list[tuple[int, str]]:
    if len(text) > LONGEST:
        raise ValueError(f"the formula has {len(text)} characters, more than {LONGEST}")
    tokens, at = [], 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise ValueError(f"not a formula from {text[at : at + 40]!r} on")
        if match.lastindex:
            tokens.append((match.lastindex, match[0]))
        at = match.end()
    return tokens


class _Reader:
    """Pratt parser with Python's precedence."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), (0, "the end")]
        self._at = 0
        self._depth = 0

    def value(self) -> Fraction:
        value = self._expression(0)
        self._expect("the end")
        return value

    def _next(self) -> str:
        return self._tokens[self._at][1]

    def _take(self) -> tuple[int, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, wanted: str) -> None:
        if (token := self._take()[1]) != wanted:
            raise ValueError(f"not a formula: {token[:40]!r} instead of {wanted!r}")

    def _expression(self, least_binding: int) -> Fraction:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"the formula is nested deeper than {DEEPEST}")
        left = self._operand()
        while (binding := _BINDING.get(self._next(), -1)) >= least_binding:
            _, symbol = self._take()
            # powers group from the right: 2**3**2 is 2**9
            right = self._expression(binding + (symbol != "**"))
            left = _sized(_OPERATORS[symbol](left, right))
        self._depth -= 1
        return left

    def _operand(self) -> Fraction:
        kind, token = self._take()
        if kind == _NUMBER:
            return _number(token)
        if token == "(":
            value = self._expression(0)
            self._expect(")")
            return value
        if token in ("+", "-"):
            value = self._expression(_SIGN_BINDING)
            return value if token == "+" else -value
        raise ValueError(f"not a formula: {token!r} instead of a number")
