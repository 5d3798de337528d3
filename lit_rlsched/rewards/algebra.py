"""Formulas with names: polynomials, and functions with their derivatives."""

import cmath
import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lit_rlsched.rewards.formulas import (
    PYTHON_OPERATORS,
    Algebra,
    bounded_power,
    decimal,
    work_out,
)


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
