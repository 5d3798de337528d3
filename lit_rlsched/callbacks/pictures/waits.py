"""Picture of when trainer and engines worked, and for whom they waited."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lit_rlsched.callbacks.pictures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    figure_of,
    seconds,
)
from lit_rlsched.scheduling.timeline import DECODE, OTHER, WEIGHTS, Interval, Lap
from lit_rlsched.text import percent

WORK = {
    DECODE: ("decoding", BLUE),
    "update": ("update", GREEN),
    "gradients": ("gradients during the rollout", "#7BCBB0"),
    "verify": ("verification of drafts", PURPLE),
    "advantages": ("advantages", RED),
    WEIGHTS: ("weights go to the engines", ORANGE),
    OTHER: ("other work of the trainer", GREY),
}
"""Label and colour of what a lane does."""
WAITS = {"trainer": "#FFFFFF", "engines": "#FBE3B5", "rewards": "#F6D2E4"}
"""Colour of a wait, by whom it is for."""


def waits(laps: Sequence[Lap], metrics: Mapping[str, float]) -> Figure:
    """Plot each lane's work and waits, and the ages of the tokens that were trained on.

    Args:
        laps: Parts of the timeline that follow one another.
        metrics: Metrics of the last round.
    """
    lanes = list(laps[-1].lanes)
    with figure_of(10.0, 3.6 + 0.45 * len(lanes)) as figure:
        top, bottom = figure.subplots(2, height_ratios=[1 + len(lanes), 2.4])
        legend = _draw_lanes(top, laps, lanes)
        _draw_ages(bottom, metrics)
        begin, end = laps[0].start, laps[-1].end
        saved = sum(lap.saved for lap in laps)
        figure.suptitle(
            f"Trainer and engines work at the same time for {seconds(saved)} of "
            f"{seconds(end - begin)}",
            x=0.01,
            ha="left",
            size=13,
        )
        figure.legend(handles=legend, loc="outside lower left", ncols=3, fontsize=10)
    return figure


def _draw_lanes(axes: Axes, laps: Sequence[Lap], lanes: Sequence[str]) -> list[Patch]:
    """Draw a row for each lane, under the share of the time in which it works."""
    begin, total, seen = laps[0].start, laps[-1].end - laps[0].start, set[str]()
    labels = []
    for row, lane in enumerate(lanes):
        intervals = [i for lap in laps for i in lap.lanes.get(lane, ())]
        for name, (_, colour) in WORK.items():
            spans = [(i.start - begin, i.end - i.start) for i in intervals if _kind(i) == name]
            axes.broken_barh(spans, (row + 0.1, 0.8), color=colour, linewidth=0)
            seen |= _visible(name, spans, total)
        for whom, colour in WAITS.items():
            spans = [(i.start - begin, i.end - i.start) for i in intervals if i.waits_for == whom]
            axes.broken_barh(
                spans, (row + 0.1, 0.8), facecolor=colour, edgecolor=GREY, linewidth=0.4, hatch="//"
            )
            seen |= _visible(whom, spans, total)
        works = sum(i.end - i.start for i in intervals if not i.waits_for)
        labels.append(f"{lane}\nworks {percent(works / (total or 1))}")
    for lap in laps[1:]:
        axes.axvline(lap.start - begin, color="black", linewidth=0.8)
    axes.set(
        ylim=(len(lanes), 0), xlim=(0, total), xlabel="seconds; a line is the end of a rollout"
    )
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], labels)
    axes.grid(False)
    handles = [Patch(color=colour, label=label) for n, (label, colour) in WORK.items() if n in seen]
    return handles + [
        Patch(facecolor=colour, edgecolor=GREY, hatch="//", label=f"waits for {_name(whom)}")
        for whom, colour in WAITS.items()
        if whom in seen
    ]


def _visible(name: str, spans: Sequence[tuple[float, float]], total: float) -> set[str]:
    return {name} if sum(length for _, length in spans) > total / 1000 else set()


def _kind(interval: Interval) -> str | None:
    return None if interval.waits_for else interval.what


def _name(whom: str) -> str:
    return whom if whom == "rewards" else f"the {whom}"


def _draw_ages(axes: Axes, metrics: Mapping[str, float]) -> None:
    """Draw the share of tokens by age; without `staleness/*` all are of the newest policy."""
    names = [name for name in metrics if name.removeprefix("staleness/")[:1].isdigit()]
    ages = {name.removeprefix("staleness/"): metrics[name] for name in names} or {"0": 1.0}
    axes.bar([*ages], [*ages.values()], color=BLUE, width=0.6)
    for age, share in ages.items():
        if share:
            axes.annotate(percent(share), (age, share), ha="center", va="bottom", size=10)
    title = "Tokens that the last round trains on, by age in optimizer steps"
    if "drafts/accepted_share" in metrics:
        title += f"; of drafts {percent(metrics['drafts/accepted_share'])} of the tokens were kept"
    axes.set_title(title, size=11)
    axes.set(xlim=(-0.6, 8.6), ylim=(0, 1.3), ylabel="share of tokens")
