"""A picture of two schedules: simulated from the lengths and costs of one, and really run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlsched.callbacks.pictures.style import BLUE, GREEN, GREY, ORANGE, figure_of
from lit_rlsched.callbacks.what_if import Setting, Simulated
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.lanes import TRAINS
from lit_rlsched.simulation.pipeline import slowdown_of

FIRST, LAST = 3, 5
"""Rounds that are drawn: the first ones warm up, and the last one of a run draws nothing ahead."""
COLOURS = (BLUE, "#7fb3dc", GREEN, "#8cc9a8", "#b08cc9", "#d9b3e6", "#c9a98c", "#e6d0b3")


@dataclass(slots=True)
class Lanes:
    """When each completion had a slot, and when the trainer computed, in seconds."""

    slots: list[tuple[str, float, float]] = field(default_factory=list)
    """Prompt, start and end."""
    trainer: list[tuple[float, float]] = field(default_factory=list)
    ends: float = 0.0
    """End of the last round that is drawn."""


def measured(folder: Path) -> Lanes:
    """Read rounds `FIRST` to `LAST` of a real run, from the first decode step on."""
    traces = Traces(folder)
    began = {row["round"]: row["began"] for row in traces.rows("rounds")}
    origin, lanes = began[FIRST], Lanes()
    lanes.ends = began[LAST + 1] - origin
    for row in traces.rows("spans"):
        if FIRST <= row["round"] <= LAST:
            at = began[row["round"]] - origin
            name = row["request"].rpartition("/")[0]
            lanes.slots.append((name, at + row["start"], at + row["end"]))
    for row in traces.rows("intervals"):
        computes = row["lane"] == "trainer" and row["what"] in TRAINS and not row["waits_for"]
        start, end = row["start"] - origin, row["end"] - origin
        if computes and end > 1.0 and start < lanes.ends:
            lanes.trainer.append((max(0.0, start), end))
    return lanes


def simulated(setting: Setting, row: Simulated) -> Lanes:
    """Simulate the same rounds, on the lengths and costs of the setting."""
    pipeline = setting.pipeline(row.schedule)
    log = pipeline.engines.log = []
    rounds = pipeline.run(LAST + 1).rounds
    lanes, at = Lanes(), 0.0
    ahead = row.schedule.ahead
    first = FIRST + (ahead == "importance")  # a rollout belongs to the update before it
    for drawn, spans in zip(rounds[FIRST - 1 : LAST], log[first - 1 :], strict=False):
        begins = at if ahead else at + drawn.rollout
        computes = drawn.update + (drawn.verification if ahead == "verify" else 0.0)
        both = min(drawn.rollout, computes) if ahead else 0.0
        lost = slowdown_of(setting.machine, setting.costs) - 1
        for item, start, end in spans:  # slower as long as both work
            begin, finish = (at + t + lost * min(t, both) for t in (start, end))
            lanes.slots.append((item.group, begin, finish))
        lanes.trainer.append((begins, begins + computes + lost * both))
        at += drawn.seconds
    lanes.ends = at
    return lanes


def rows_of(spans: Sequence[tuple[str, float, float]]) -> Iterable[tuple[int, float, float, str]]:
    """Place spans in the lowest slots that are free, as the engine does."""
    free: list[float] = []
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        slot = next((i for i, until in enumerate(free) if until <= start + 1e-6), len(free))
        free[slot : slot + 1] = [end]
        yield slot, start, end, name


def draw(axes: Axes, title: str, lanes: Lanes, slots: int) -> None:
    """Draw the trainer above the slots; there are a few more where drafts begin early."""
    colours, of = cycle(COLOURS), dict[str, str]()
    for slot, start, end, name in rows_of(lanes.slots):
        colour = of[name] = of.get(name) or next(colours)
        axes.broken_barh([(start, end - start)], (slot, 1), facecolor=colour, linewidth=0)
    for start, end in lanes.trainer:
        axes.broken_barh([(start, end - start)], (slots + 7, 8), facecolor=ORANGE, linewidth=0)
    for x in (0.0, lanes.ends):
        axes.axvline(x, color=GREY, linewidth=1)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_yticks([slots / 2, slots + 11], [f"{slots} completions", "trainer"])
    axes.set_ylim(0, slots + 16)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


def twin(setting: Setting, pairs: Sequence[tuple[str, Simulated, Path]]) -> Figure:
    """Draw each schedule twice: its simulation on the left, its real run on the right.

    Args:
        setting: What is simulated: lengths and costs of the plain run.
        pairs: A title, the schedule and the folder of its run.
    """
    slots = setting.about["prompts_per_round"] * setting.about["num_generations"]
    number = LAST - FIRST + 1
    with figure_of(13.0, 3.0 * len(pairs)) as figure:
        every = figure.subplots(len(pairs), 2, sharex=True, sharey=True, squeeze=False)
        for (left, right), (title, row, folder) in zip(every, pairs, strict=True):
            before, after = simulated(setting, row), measured(folder)
            draw(left, f"{title}, simulated: {before.ends / number:.1f} s a round", before, slots)
            draw(right, f"{title}, real run: {after.ends / number:.1f} s a round", after, slots)
        for axes in every[-1]:
            axes.set_xlabel("seconds")
    return figure
