"""Picture of simulated schedules: seconds, and what they cost in bias and waste."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from lit_rlsched.callbacks.pictures.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of
from lit_rlsched.simulation.pipeline import Outcome

PANELS = (
    ("seconds", "seconds for an update", BLUE),
    ("idle_share", "idle slot-steps", GREY),
    ("discarded_share", "discarded tokens", RED),
    ("stale_share", "tokens of earlier policies", ORANGE),
    ("length_bias", "trained / drawn length", GREEN),
)
"""Figures of an outcome, with title and colour."""


def simulated(outcomes: Mapping[str, Outcome], plain: Outcome) -> Figure:
    """Plot the figures of each schedule, the fastest first."""
    shown = sorted(outcomes.items(), key=lambda of: -of[1].seconds)
    names = [name for name, _ in shown]
    with figure_of(15.0, 1.2 + 0.28 * len(shown)) as figure:
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for (name, title, colour), axes in zip(PANELS, panels, strict=True):
            values = [getattr(outcome, name) for _, outcome in shown]
            axes.barh(names, values, color=colour, height=0.7)
            axes.grid(axis="x")
            axes.grid(axis="y", visible=False)
            axes.set_title(title)
            axes.axvline(getattr(plain, name), color="black", linewidth=1, linestyle=":")
        panels[0].set_ylim(-0.6, len(shown) - 0.4)
        figure.suptitle("Simulated schedules; dotted: without a callback", x=0.01, ha="left")
    return figure
