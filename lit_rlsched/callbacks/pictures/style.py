"""Colours and layout that the pictures share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_rlsched.text import three_digits

# the colours of Okabe and Ito, which colour-blind readers can tell apart
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#AA4A87"
GREY, BLACK = "#8C8C8C", "#000000"
FINISHES = {
    "length": ("cut at the limit of {:,} tokens", RED),
    "stop": ("ended by itself", BLUE),
    None: ("not trained on in this round", GREY),
}
"""Label and colour of a completion, by its finish reason."""
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
}


@contextmanager
def figure_of(width: float, height: float) -> Iterator[Figure]:
    """Yield a figure in our style, unknown to pyplot and without changing its global settings."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=130)


def whole_numbers(bins: int) -> MaxNLocator:
    """Return a locator of at most `bins` whole numbers."""
    return MaxNLocator(nbins=bins, steps=[1, 2, 5, 10], integer=True)


def seconds(value: float) -> str:
    """Return seconds with three digits or more, as on the axis: `0.123 s`, `1,234 s`."""
    return f"{three_digits(value)} s"
