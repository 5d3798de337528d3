"""Formulas read and worked out here: what a model or a row wrote is never compiled.

`eval` and SymPy's parser run their text as Python. This reader knows numbers, single names, a fixed
list of functions and the operators below; everything else raises `ValueError`. Length, depth,
powers, shifts and sizes are bounded, so that none takes long.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

LONGEST = 2000
"""Characters of a formula."""
DEEPEST = 50
"""Parentheses within each other, powers of powers and signs in a row."""
MAX_BITS = 8192
"""Of a number on the way."""
MAX_POWER = 1000
MAX_SHIFT = 64

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:(0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|([A-Za-z]+[0-9]*)"
    r"|(\*\*|<<|>>|[-+*/()]))"
)
_BINDING = {"<<": 1, ">>": 1, "+": 2, "-": 2, "*": 3, "/": 3, "**": 5}
_SIGN_BINDING = 4

Value = TypeVar("Value")


@dataclass(frozen=True)
class Algebra:
    """What numbers, names, functions and operators of a formula stand for."""

    number: Callable[[str], Any]
    operators: Mapping[str, Callable[[Any, Any], Any]]
    name: Callable[[str], Any] | None = None
    functions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


def work_out(text: str, algebra: Algebra) -> Any:
    """The value of a formula.

    Raises:
        ValueError: it is none, or one that is too large.
    """
    try:
        return _Reader(text, algebra).value()
    except ArithmeticError as error:  # a division by zero, an overflow
        raise ValueError(f"{text[:80]!r}: {error}") from None


class _Reader:
    """Reads by binding strength (Pratt), with Python's precedence."""

    def __init__(self, text: str, algebra: Algebra) -> None:
        if len(text) > LONGEST:
            raise ValueError(f"a formula of {len(text)} characters: {LONGEST} are the most")
        self._text = text.rstrip(" \t\r\n")
        self._algebra = algebra
        self._at = 0
        self._depth = 0
        self._advance()

    def value(self) -> Any:
        value = self._expression(0)
        if self._kind is not None:
            raise self._unread()
        return value

    def _advance(self) -> None:
        self._kind, self._token, self._start = None, "", self._at
        if self._at < len(self._text):
            if (match := _TOKEN.match(self._text, self._at)) is None:
                raise self._unread()
            self._kind, self._token = match.lastindex, match[match.lastindex or 0]
            self._at = match.end()

    def _expression(self, least: int) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"a formula deeper than {DEEPEST}")
        left = self._operand()
        while (binding := _BINDING.get(self._token, -1)) >= least:
            symbol = self._token
            self._advance()
            # a power takes the next one first: 2**3**2 is 2**9
            right = self._expression(binding + (symbol != "**"))
            left = self._apply(symbol, left, right)
        self._depth -= 1
        return left

    def _operand(self) -> Any:
        kind, token = self._kind, self._token
        if kind is None:
            raise self._unread()
        self._advance()
        if kind == 1:
            return self._algebra.number(token)
        if kind == 2:
            return self._named(token)
        if token == "(":
            return self._inside()
        if token == "+":
            return self._expression(_SIGN_BINDING)
        if token == "-":
            return self._apply("-", self._algebra.number("0"), self._expression(_SIGN_BINDING))
        raise self._unread()

    def _named(self, name: str) -> Any:
        if self._token == "(":
            self._advance()
            argument = self._inside()
            if name not in self._algebra.functions:
                raise ValueError(f"there is no function `{name[:20]}`")
            return self._algebra.functions[name](argument)
        if self._algebra.name is None:
            raise ValueError(f"there is no `{name[:20]}`")
        return self._algebra.name(name)

    def _inside(self) -> Any:
        value = self._expression(0)
        if self._token != ")":
            raise self._unread()
        self._advance()
        return value

    def _apply(self, symbol: str, left: Any, right: Any) -> Any:
        if symbol not in self._algebra.operators:
            raise ValueError(f"there is no `{symbol}`")
        return self._algebra.operators[symbol](left, right)

    def _unread(self) -> ValueError:
        return ValueError(f"no formula from {self._text[self._start : self._start + 40]!r} on")


def sized(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"a number of more than {MAX_BITS} bits")
    return value


def power_of(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_POWER:
        raise ValueError(f"a power of {exponent}")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS:
        raise ValueError(f"a number of more than {MAX_BITS} bits")
    return Fraction(base ** int(exponent))


def _of_size(function: Callable[[Fraction, Fraction], Fraction]) -> Any:
    return lambda left, right: sized(function(left, right))


def decimal(text: str) -> Fraction:
    return sized(Fraction(int(text, 16) if text[:2] in ("0x", "0X") else text))


ARITHMETIC = Algebra(
    decimal,
    {
        "+": _of_size(operator.add),
        "-": _of_size(operator.sub),
        "*": _of_size(operator.mul),
        "/": _of_size(operator.truediv),
        "**": power_of,
    },
)
"""Exact, with Python's operators on whole numbers and decimals."""


def _shift(function: Callable[[int, int], int]) -> Callable[[Fraction, Fraction], Fraction]:
    def shifted(value: Fraction, by: Fraction) -> Fraction:
        if value.denominator != 1 or by.denominator != 1 or not 0 <= by <= MAX_SHIFT:
            raise ValueError(f"a shift by {by}")
        return sized(Fraction(function(int(value), int(by))))

    return shifted


BITWISE = Algebra(
    decimal,
    {name: ARITHMETIC.operators[name] for name in "+-*"}
    | {"<<": _shift(operator.lshift), ">>": _shift(operator.rshift)},
)
