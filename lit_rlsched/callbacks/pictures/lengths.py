"""Picture of the lengths of a round's completions."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from lit_rlsched.callbacks.pictures.style import (
    BLACK,
    FINISHES,
    RED,
    figure_of,
    whole_numbers,
)
from lit_rlsched.text import counted
from lit_rlsched.training.round import Round

PERCENTILES = (50, 90, 99)


def length_histogram(round: Round) -> Figure:
    """Plot the round's completion lengths; the axis is logarithmic if a few are much longer."""
    lengths = np.array([c.drawn for c in round.completions])
    limit = max(group.sampling.max_completion_length for group in round.groups)
    marks = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    skewed = lengths.min() > 0 and marks[-1] > 5 * marks[0]
    low, high = lengths.min(), max(lengths.max(), lengths.min() + 1)
    edges = np.geomspace(low, high, 41) if skewed else np.linspace(low, high, 41)
    parts = {
        reason: [c.drawn for c in round.completions if c.finish_reason == reason]
        for reason in FINISHES
    }
    present = [reason for reason in FINISHES if parts[reason]]
    with figure_of(9.0, 4.6) as figure:
        axes = figure.subplots()
        axes.margins(y=0.1)
        axes.hist(
            [parts[reason] for reason in present],
            bins=edges.tolist(),
            stacked=True,
            color=[FINISHES[reason][1] for reason in present],
            label=[f"{FINISHES[r][0].format(limit)} ({len(parts[r]):,})" for r in present],
            edgecolor="white",
            linewidth=0.4,
        )
        axes.set(xlabel="length of a completion (tokens)", ylabel="number of completions")
        axes.yaxis.set_major_locator(whole_numbers(8))
        if skewed:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # also within a decade
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("length of a completion (tokens, logarithmic scale)")
        _mark_percentiles(axes, dict(zip(PERCENTILES, marks, strict=True)))
        _mark_limit(axes, limit)
        axes.set_title(
            f"Round {round.ordinal}: {counted(len(lengths), 'completion')} of "
            f"{lengths.mean():,.0f} tokens on average"
        )
        figure.legend(loc="outside lower left", ncols=2, fontsize=10.5)
    return figure


def _mark_percentiles(axes: Axes, lengths: Mapping[int, int]) -> None:
    """Draw a line at each percentile; the legend names them, because lines may be close."""
    for (percent, length), dashes in zip(lengths.items(), ("-", "--", ":"), strict=True):
        name = "median:" if percent == 50 else f"{percent} % have at most"
        label = f"{name} {length:,} tokens"
        axes.axvline(length, color=BLACK, linestyle=dashes, linewidth=1.3, label=label)


def _mark_limit(axes: Axes, limit: int) -> None:
    """Draw a line at the limit; if the axis would become too long, the legend says where it is."""
    left, right = axes.get_xlim()
    label, near = f"limit of {limit:,} tokens", limit <= 1.5 * right
    at: list[float] = [limit] if near else []
    axes.plot(
        [*at, *at],
        [0, 1] if near else [],
        color=RED,
        linewidth=1.3,
        transform=axes.get_xaxis_transform(),
        label=label if near else f"{label}, beyond the right edge",
    )
    axes.set_xlim(left, max(right, 1.02 * limit) if near else right)
