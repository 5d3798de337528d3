"""Text for people and for files."""

import math
from typing import Any


def printable(value: Any) -> Any:
    """Return the value with unpaired surrogates, which UTF-8 cannot encode, escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item) for item in value]
    return value


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 slot`, `5 slots`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share such as `3 %`."""
    return f"{share:.0%}".replace("%", " %")


def three_digits(value: float) -> str:
    """Return a number with at least three digits, without an exponent: `0.123`, `12.3`, `1,234`."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration such as `3.2 s`, `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60 - 0.5)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
