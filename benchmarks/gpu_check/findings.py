"""Figures that a check measures, with their limits."""

import json
import math
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Figure:
    """A measured figure."""

    name: str
    value: Any
    unit: str = ""
    limit: str = ""
    """Limit or expected value; empty if the figure is only recorded."""
    ok: bool | None = None
    """Whether it is within its limit; None if there is none."""
    advice: str = ""
    """What to do or to report if it is not."""

    def __str__(self) -> str:
        value = f"{self.value:,.4g}" if isinstance(self.value, float) else str(self.value)
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name} {value}{unit}" + (f" ({self.limit})" if self.limit else "")


@dataclass
class Findings:
    """Findings of one check, written to a file at once so that a crash loses none.

    Args:
        path: The file; None writes nothing.
    """

    path: Path | None = None
    figures: list[Figure] = field(default_factory=list)
    skipped: str = ""
    """Why this machine cannot judge the check; it may have run as a rehearsal."""
    error: str = ""
    """Traceback of an error that the check raised."""
    done: bool = False
    """Whether the check ran to its end."""

    def record(self, name: str, value: Any, unit: str = "") -> None:
        """Record a figure without a limit."""
        self._add(Figure(name, _plain(value), unit))

    def at_most(
        self, name: str, value: float, limit: float, unit: str = "", advice: str = ""
    ) -> None:
        """Judge a figure that must not be above `limit`. NaN fails."""
        ok = bool(value <= limit)
        self._add(Figure(name, _plain(value), unit, f"at most {limit:,.4g}", ok, advice))

    def at_least(
        self, name: str, value: float, limit: float, unit: str = "", advice: str = ""
    ) -> None:
        """Judge a figure that must not be below `limit`. NaN fails."""
        ok = bool(value >= limit)
        self._add(Figure(name, _plain(value), unit, f"at least {limit:,.4g}", ok, advice))

    def equal(self, name: str, value: Any, expected: Any, advice: str = "") -> None:
        """Judge a figure that must equal `expected`."""
        self._add(Figure(name, _plain(value), "", f"must be {expected}", value == expected, advice))

    def one_of(self, name: str, value: Any, expected: Collection[Any], advice: str = "") -> None:
        """Judge a figure that must be one of `expected`."""
        limit = "one of " + ", ".join(map(str, expected))
        self._add(Figure(name, _plain(value), "", limit, value in expected, advice))

    def skip(self, why: str) -> None:
        """Mark the check as not judged on this machine; it may continue as a rehearsal."""
        self.skipped = why
        self.write()

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        if self.path is None:
            return
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({k: v for k, v in asdict(self).items() if k != "path"}))
        os.replace(part, self.path)

    @classmethod
    def read(cls, path: Path) -> "Findings":
        """Read the findings of a check; empty if it wrote none."""
        if not path.exists():
            return cls()
        held = json.loads(path.read_text())
        figures = [Figure(**figure) for figure in held.pop("figures")]
        return cls(figures=figures, **held)


class Skip(Exception):
    """Raised by a check that cannot run on this machine, with the reason."""


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON can hold."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)
