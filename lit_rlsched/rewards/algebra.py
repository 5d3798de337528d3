"""What formulas of names stand for: polynomials, and functions with their derivatives."""

import cmath
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lit_rlsched.rewards.formulas import (
    MAX_POWER,
    Algebra,
    decimal,
    power_of,
    sized,
    work_out,
)

MAX_TERMS = 1000
"""Of a polynomial."""

Monomial = tuple[tuple[str, int], ...]
"""Names with their powers, in order."""
Polynomial = dict[Monomial, Fraction]


def _polynomial(terms: Mapping[Monomial, Fraction]) -> Polynomial:
    if len(terms) > MAX_TERMS:
        raise ValueError(f"a polynomial of more than {MAX_TERMS} terms")
    return {names: factor for names, factor in terms.items() if factor}


def _sum(left: Polynomial, right: Polynomial, sign: int = 1) -> Polynomial:
    terms = dict(left)
    for names, factor in right.items():
        terms[names] = sized(terms.get(names, Fraction(0)) + sign * factor)
    return _polynomial(terms)


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(left) < len(right):
        left, right = right, left
    # multiplying out is the exercise: only a number may stand before a sum
    if len(right) > 1 or (len(left) > 1 and any(right)):
        raise ValueError("a product that is not multiplied out")
    terms = {
        _times(names, others, 1): sized(factor * other)
        for names, factor in left.items()
        for others, other in right.items()
    }
    return _polynomial(terms)


def _times(names: Monomial, others: Monomial, sign: int) -> Monomial:
    powers = dict(names)
    for name, power in others:
        powers[name] = powers.get(name, 0) + sign * power
        if abs(powers[name]) > MAX_POWER:
            raise ValueError(f"a power of {powers[name]}")
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _quotient(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(right) != 1:
        raise ValueError("a division by a sum, or by zero")
    ((names, factor),) = right.items()
    return _product(left, {_times((), names, -1): 1 / factor})


def _polynomial_power(base: Polynomial, exponent: Polynomial) -> Polynomial:
    if exponent.keys() - {()} or exponent.get((), Fraction(0)).denominator != 1:
        raise ValueError("a power that is no whole number")
    power = int(exponent.get((), 0))
    if len(base) != 1:
        raise ValueError("a power that is not multiplied out")
    ((names, factor),) = base.items()
    raised = tuple((name, of * power) for name, of in names)
    return {_times((), raised, 1): power_of(factor, Fraction(power))}


POLYNOMIALS = Algebra(
    lambda text: _polynomial({(): decimal(text)}),
    {
        "+": _sum,
        "-": lambda left, right: _sum(left, right, -1),
        "*": _product,
        "/": _quotient,
        "**": _polynomial_power,
    },
    lambda name: {((name, 1),): Fraction(1)},
)
"""Sums of terms; what is not multiplied out raises, so that it never equals what is."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A value, and how fast it changes with the variable."""

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
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}


def slopes(text: str, variable: str, points: tuple[complex, ...] = _POINTS) -> list[Slope]:
    """A formula of one variable and its derivative, at points of the complex plane.

    Other letters, `C` and `C1`, are constants.

    Raises:
        ValueError: it is no formula, or has no value at one of the points.
    """

    def at(point: complex) -> Slope:
        def named(name: str) -> Slope:
            if name == variable:
                return Slope(point, 1)
            if name in _CONSTANTS:
                return Slope(_CONSTANTS[name])
            if name[1:].isalpha():
                raise ValueError(f"there is no `{name[:20]}`")
            return Slope(complex(1 + ord(name[0]) / 100, 0.3))

        algebra = Algebra(lambda t: Slope(complex(decimal(t))), _OPERATORS, named, _FUNCTIONS)
        found = work_out(text, algebra)
        if not (cmath.isfinite(found.value) and cmath.isfinite(found.slope)):
            raise ValueError(f"{text[:80]!r} has no finite value")
        return found

    return [at(point) for point in points]


def is_integral(answer: str, integrand: str, variable: str) -> bool:
    """Whether the derivative of `answer` is `integrand`, as functions of a complex variable.

    Both are compared at points where two different formulas of this size do not agree by chance.

    Raises:
        ValueError: one of them is no formula.
    """
    wanted = [at.value for at in slopes(integrand, variable)]
    given = [at.slope for at in slopes(answer, variable)]
    return all(abs(w - g) <= 1e-8 * (abs(w) + abs(g)) for w, g in zip(wanted, given, strict=True))
