"""Reader of formulas that neither compiles nor runs them.

`eval` and SymPy's parser run their text as Python. This reader knows numbers, the operators
`+ - * / ** << >>`, and the names and functions that an `Algebra` lists; anything else raises
`ValueError`. The length and depth of a formula and the size of its numbers are bounded, so that
none takes long.
"""

import cmath
import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

LONGEST = 2000
"""Maximum number of characters in a formula."""
DEEPEST = 50
"""Maximum nesting of parentheses, powers of powers and signs in a row."""
MAX_BITS = 8192
"""Maximum size of a number's numerator and denominator."""
MAX_POWER = 1000
MAX_SHIFT = 64

_TOKEN = re.compile(
    r"(0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|([A-Za-z]+[0-9]*)"
    r"|(\*\*|<<|>>|[-+*/()])|[ \t\r\n]+"
)
_NUMBER, _NAME = 1, 2
_BINDING = {"<<": 1, ">>": 1, "+": 2, "-": 2, "*": 3, "/": 3, "**": 5}
_SIGN_BINDING = 4

PYTHON_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}


def sized(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"a number exceeds {MAX_BITS} bits")
    return value


def decimal(text: str) -> Fraction:
    return sized(Fraction(int(text, 16) if text[:2] in ("0x", "0X") else text))


def bounded_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_POWER:
        raise ValueError(f"the exponent {exponent} is not a whole number up to {MAX_POWER}")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS:
        raise ValueError(f"a number exceeds {MAX_BITS} bits")
    return Fraction(base ** int(exponent))


def _unknown(name: str) -> Any:
    raise ValueError(f"unknown name `{name[:20]}`")


def _bounded(function: Callable[[Any, Any], Any]) -> Callable[[Fraction, Fraction], Fraction]:
    return lambda left, right: sized(function(left, right))


def _shift(function: Callable[[int, int], int]) -> Callable[[Fraction, Fraction], Fraction]:
    def shifted(value: Fraction, by: Fraction) -> Fraction:
        if value.denominator != 1 or by.denominator != 1 or not 0 <= by <= MAX_SHIFT:
            raise ValueError(f"the shift {by} is not a whole number up to {MAX_SHIFT}")
        return sized(Fraction(function(int(value), int(by))))

    return shifted


@dataclass(frozen=True)
class Algebra:
    """Meaning of the numbers, operators, names and functions of a formula.

    The defaults are exact arithmetic on decimal numbers, without names and functions.
    """

    number: Callable[[str], Any] = decimal
    operators: Mapping[str, Callable[[Any, Any], Any]] = field(
        default_factory=lambda: {
            **{symbol: _bounded(function) for symbol, function in PYTHON_OPERATORS.items()},
            "**": bounded_power,
            "<<": _shift(operator.lshift),
            ">>": _shift(operator.rshift),
        }
    )
    name: Callable[[str], Any] = _unknown
    functions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


ARITHMETIC = Algebra()


def work_out(text: str, algebra: Algebra = ARITHMETIC) -> Any:
    """Return the value of a formula.

    Raises:
        ValueError: `text` is not a formula, or is too large, or has no value.
    """
    try:
        return _Reader(text, algebra).value()
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

    def __init__(self, text: str, algebra: Algebra) -> None:
        self._tokens = [*_tokens(text), (0, "the end")]
        self._at = 0
        self._depth = 0
        self._algebra = algebra

    def value(self) -> Any:
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

    def _expression(self, least_binding: int) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"the formula is nested deeper than {DEEPEST}")
        left = self._operand()
        while (binding := _BINDING.get(self._next(), -1)) >= least_binding:
            _, symbol = self._take()
            # powers group from the right: 2**3**2 is 2**9
            right = self._expression(binding + (symbol != "**"))
            left = self._apply(symbol, left, right)
        self._depth -= 1
        return left

    def _operand(self) -> Any:
        kind, token = self._take()
        if kind == _NUMBER:
            return self._algebra.number(token)
        if kind == _NAME:
            return self._named(token)
        if token == "(":
            return self._until_closed()
        if token == "+":
            return self._expression(_SIGN_BINDING)
        if token == "-":
            return self._apply("-", self._algebra.number("0"), self._expression(_SIGN_BINDING))
        raise ValueError(f"not a formula: {token!r} instead of a number or name")

    def _named(self, name: str) -> Any:
        if self._next() != "(":
            return self._algebra.name(name)
        if name not in self._algebra.functions:
            raise ValueError(f"unknown function `{name[:20]}`")
        self._take()
        return self._algebra.functions[name](self._until_closed())

    def _until_closed(self) -> Any:
        value = self._expression(0)
        self._expect(")")
        return value

    def _apply(self, symbol: str, left: Any, right: Any) -> Any:
        if symbol not in self._algebra.operators:
            raise ValueError(f"the operator `{symbol}` is not allowed")
        return self._algebra.operators[symbol](left, right)


@functools.cache
def polynomials() -> Algebra:
    """Formulas as SymPy expressions, made without SymPy's parser.

    Two are equal only if both are multiplied out, as SymPy multiplies out nothing but a number and
    a sum.
    """
    import sympy

    def number(text: str) -> Any:
        value = decimal(text)
        return sympy.Rational(value.numerator, value.denominator)

    def quotient(left: Any, right: Any) -> Any:
        if right == 0:
            raise ZeroDivisionError("a division by zero")
        return left / right

    def power(base: Any, exponent: Any) -> Any:
        if not exponent.is_Integer:
            raise ValueError(f"the exponent {exponent!s:.40} is not a whole number")
        factor, _ = base.as_coeff_Mul()
        bounded_power(Fraction(int(factor.p), int(factor.q)), Fraction(int(exponent)))
        return base**exponent

    return Algebra(number, PYTHON_OPERATORS | {"/": quotient, "**": power}, sympy.Symbol)


@dataclass(frozen=True, slots=True)
class Slope:
    """Value of a function and its derivative at one point (a dual number)."""

    value: complex
    slope: complex = 0

    def __add__(self, other: "Slope") -> "Slope":
        return Slope(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: "Slope") -> "Slope":
        return Slope(self.value - other.value, self.slope - other.slope)

    def __mul__(self, other: "Slope") -> "Slope":
        slope = self.slope * other.value + self.value * other.slope
        return Slope(self.value * other.value, slope)

    def __truediv__(self, other: "Slope") -> "Slope":
        value = self.value / other.value
        return Slope(value, (self.slope - value * other.slope) / other.value)

    def __pow__(self, other: "Slope") -> "Slope":
        value, exponent = self.value**other.value, other.value
        slope = exponent * self.value ** (exponent - 1) * self.slope if exponent else 0
        if other.slope:
            slope += value * cmath.log(self.value) * other.slope
        return Slope(value, slope)


def _with_slope(function: Callable[[complex], complex], slope: Callable[[complex], complex]) -> Any:
    return lambda at: Slope(function(at.value), slope(at.value) * at.slope)


_FUNCTIONS: dict[str, Callable[[Slope], Slope]] = {
    name: _with_slope(function, slope)
    for name, function, slope in [
        ("exp", cmath.exp, cmath.exp),
        ("log", cmath.log, lambda z: 1 / z),
        ("ln", cmath.log, lambda z: 1 / z),
        ("sqrt", cmath.sqrt, lambda z: 0.5 / cmath.sqrt(z)),
        ("sin", cmath.sin, cmath.cos),
        ("cos", cmath.cos, lambda z: -cmath.sin(z)),
        ("tan", cmath.tan, lambda z: 1 / cmath.cos(z) ** 2),
        ("sec", lambda z: 1 / cmath.cos(z), lambda z: cmath.sin(z) / cmath.cos(z) ** 2),
        ("csc", lambda z: 1 / cmath.sin(z), lambda z: -cmath.cos(z) / cmath.sin(z) ** 2),
        ("cot", lambda z: 1 / cmath.tan(z), lambda z: -1 / cmath.sin(z) ** 2),
        ("asin", cmath.asin, lambda z: 1 / cmath.sqrt(1 - z * z)),
        ("acos", cmath.acos, lambda z: -1 / cmath.sqrt(1 - z * z)),
        ("atan", cmath.atan, lambda z: 1 / (1 + z * z)),
        ("sinh", cmath.sinh, cmath.cosh),
        ("cosh", cmath.cosh, cmath.sinh),
        ("tanh", cmath.tanh, lambda z: 1 / cmath.cosh(z) ** 2),
        ("asinh", cmath.asinh, lambda z: 1 / cmath.sqrt(1 + z * z)),
        ("acosh", cmath.acosh, lambda z: 1 / (cmath.sqrt(z - 1) * cmath.sqrt(z + 1))),
        ("atanh", cmath.atanh, lambda z: 1 / (1 - z * z)),
    ]
}
_CONSTANTS = {"pi": cmath.pi, "E": cmath.e, "I": 1j}
_POINTS = (0.73 + 0.31j, -1.27 + 0.58j, 1.91 - 0.83j, -0.44 - 1.13j, 2.62 + 1.71j, -2.35 - 0.37j)


def slopes(text: str, variable: str) -> list[Slope]:
    """Return the values and derivatives of a formula at six points of the complex plane.

    Letters other than the variable, such as `C` and `C1`, are constants.

    Raises:
        ValueError: `text` is not a formula, or has no finite value at one of the points.
    """
    return [_slope(text, variable, point) for point in _POINTS]


def _slope(text: str, variable: str, point: complex) -> Slope:
    def named(name: str) -> Slope:
        if name == variable:
            return Slope(point, 1)
        if name in _CONSTANTS:
            return Slope(_CONSTANTS[name])
        if name[1:].isalpha():
            raise ValueError(f"unknown name `{name[:20]}`")
        return Slope(complex(1 + ord(name[0]) / 100, 0.3))

    def number(digits: str) -> Slope:
        return Slope(complex(decimal(digits)))

    found: Slope = work_out(text, Algebra(number, PYTHON_OPERATORS, named, _FUNCTIONS))
    if not (cmath.isfinite(found.value) and cmath.isfinite(found.slope)):
        raise ValueError(f"{text[:80]!r} has no finite value")
    return found


def is_integral(answer: str, integrand: str, variable: str) -> bool:
    """Return whether the derivative of `answer` equals `integrand`.

    Both are compared at points where two different formulas of this size do not agree by chance.

    Raises:
        ValueError: one of them is not a formula.
    """
    wanted = [at.value for at in slopes(integrand, variable)]
    given = [at.slope for at in slopes(answer, variable)]
    return all(abs(w - g) <= 1e-8 * (abs(w) + abs(g)) for w, g in zip(wanted, given, strict=True))
