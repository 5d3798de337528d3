"""Pictures of a run, as matplotlib figures, and who gets them."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from lit_rlsched.callbacks.run_curve import RunCurve
from lit_rlsched.run_folder import folder_of
from lit_rlsched.training.round import Round

# Okabe and Ito's colours, which colour-blind readers tell apart
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"
FINISHES = {
    "stop": ("ended by itself", BLUE),
    "length": ("cut at the limit", RED),
    None: ("not trained on yet", GREY),
}
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "savefig.dpi": 130,
}


def draw(curve: RunCurve) -> dict[str, Figure]:
    """All pictures that there is something for, by name."""
    figures, last = {}, curve.last
    if curve.rounds:
        figures["learning"] = learning_curve(curve.rounds, curve.validations)
    if last is not None:
        figures["lengths"] = length_histogram(last)
        if last.trace is not None and last.trace.steps:
            figures["timeline"] = slot_timeline(last)
    return figures


def publish(figures: Mapping[str, Figure], trainer: Trainer) -> None:
    """Save pictures in the run's folder, and hand them to W&B and TensorBoard."""
    for name, figure in figures.items():
        path, step = folder_of(trainer) / f"{name}.png", trainer.global_step
        figure.savefig(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(f"pictures/{name}", [str(path)], step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(f"pictures/{name}", figure, step)


def learning_curve(
    rounds: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, float]]
) -> Figure:
    """Reward, and above it held-out accuracy where there is any, over optimizer steps.

    Args:
        rounds: Has `step` and `reward` of each round.
        validations: Has `step` and the module's `val/` figures of each validation.
    """
    curves = _accuracy_curves(validations)
    with _figure(8.0, 6.2 if curves else 3.8) as figure:
        axes = figure.subplots(2 if curves else 1, sharex=True, squeeze=False)[:, 0]
        if curves:
            _draw_accuracy(axes[0], curves)
        _draw_reward(axes[-1], rounds)
        axes[-1].set_xlabel("optimizer steps")
        axes[-1].xaxis.set_major_locator(_whole_numbers(10))
    return figure


def slot_timeline(round: Round) -> Figure:
    """What each slot decoded when, and how many ran at once.

    Raises:
        ValueError: the round has no trace.
    """
    trace = round.trace
    if trace is None:
        raise ValueError(f"Round {round.number} has no trace: it comes from a checkpoint.")
    steps, spans = trace.steps, trace.spans
    reasons = {f"{g.id}/{c.index}": c.finish_reason for g in round.groups for c in g.completions}
    with _figure(9.0, 6.0) as figure:
        slots, count = figure.subplots(2, sharex=True, height_ratios=[3, 1])
        shown, second = [], _every_second(spans)
        for reason, (label, colour) in FINISHES.items():
            rows = [i for i, r in enumerate(spans["request"]) if reasons.get(r) == reason]
            if rows:
                bars = [_bar(spans["slot"][i], spans["start"][i], spans["end"][i]) for i in rows]
                shades = [_lighter(colour) if second[i] else colour for i in rows]
                slots.add_collection(PolyCollection(bars, facecolors=shades, linewidth=0))
                number = len({spans["request"][i] for i in rows})
                shown.append(Patch(color=colour, label=f"{label} ({number})"))
        for start, end in trace.work:
            count.axvspan(start, end, color=GREEN, alpha=0.35, linewidth=0, zorder=3)
        if trace.work:
            label = f"the trainer computes gradients ({trace.work_seconds:.3g} s)"
            shown.append(Patch(color=GREEN, alpha=0.35, label=label))
        slots.set(ylim=(trace.slots - 0.5, -0.5), ylabel="slot")
        slots.yaxis.set_major_locator(_whole_numbers(8))
        slots.grid(False)
        slots.set_title(
            f"Round {round.number}: {len(set(spans['request']))} completions, "
            f"Q = {trace.slots} slots, {trace.seconds:.3g} s, bubble ratio {trace.bubble_ratio:.2f}"
        )
        figure.legend(handles=shown, loc="outside lower center", ncols=3)

        ends = [0.0, *steps["end"]]
        running = [float(n) for n in steps["running"]]
        full = [float(trace.slots)] * len(running)
        count.stairs(running, ends, fill=True, color=GREY)
        count.stairs(full, ends, baseline=running, fill=True, color=ORANGE, alpha=0.4)
        mean = (1 - trace.bubble_ratio) * trace.slots
        count.set(
            xlim=(0, trace.seconds or 1),
            ylim=(0, trace.slots * 1.05),
            xlabel="seconds since the first decode step",
            ylabel="running",
        )
        count.yaxis.set_major_locator(_whole_numbers(4))
        count.set_title(
            f"{mean:.3g} of {trace.slots} slots run on average (grey), the rest idle", size=11
        )
    return figure


def length_histogram(round: Round) -> Figure:
    """How long the round's completions are, on a logarithmic axis where few are far longer."""
    lengths = np.array([len(c.token_ids) for c in round.completions])
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").tolist()
    skewed = lengths.min() > 0 and p99 > 5 * p50
    low, high = lengths.min(), max(lengths.max(), lengths.min() + 1)
    edges = np.geomspace(low, high, 41) if skewed else np.linspace(low, high, 41)
    with _figure(8.0, 4.2) as figure:
        axes = figure.subplots()
        parts = {
            reason: [len(c.token_ids) for c in round.completions if c.finish_reason == reason]
            for reason in FINISHES
        }
        present = [reason for reason in FINISHES if parts[reason]]
        axes.hist(
            [parts[reason] for reason in present],
            bins=edges.tolist(),
            stacked=True,
            color=[FINISHES[reason][1] for reason in present],
            label=[f"{FINISHES[reason][0]} ({len(parts[reason])})" for reason in present],
            edgecolor="white",
            linewidth=0.4,
        )
        top = axes.get_ylim()[1]
        axes.set_ylim(0, top * 1.22)
        axes.set(xlabel="completion length (tokens)", ylabel="completions")
        axes.yaxis.set_major_locator(_whole_numbers(8))
        if skewed:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("completion length (tokens, logarithmic)")
        _mark_percentiles(axes, {"p50": p50, "p90": p90, "p99": p99})
        axes.set_title(
            f"Round {round.number}: {len(lengths)} completions, "
            f"{lengths.mean():.0f} tokens on average"
        )
        figure.legend(loc="outside lower center", ncols=3)
    return figure


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """A figure that no global state knows of, in our style while it is drawn."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=130)
        FigureCanvasAgg(figure)
        yield figure


def _accuracy_curves(
    validations: Sequence[Mapping[str, float]],
) -> dict[str, list[tuple[float, float]]]:
    names = {name for figures in validations for name in figures}
    sampled = sorted(name for name in names if name.startswith("val/mean@"))
    greedy = sorted(names & {"val/greedy_accuracy"})
    wanted = [*sampled, *greedy] or sorted(names & {"val/accuracy"})
    return {
        name: points
        for name in wanted
        if (
            points := [
                (f["step"], f[name]) for f in validations if math.isfinite(f.get(name, math.nan))
            ]
        )
    }


def _draw_accuracy(axes: Axes, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    labels = {"val/greedy_accuracy": "greedy", "val/accuracy": "accuracy"}
    looks = zip(
        curves.items(), (BLUE, RED, GREEN, ORANGE), ("o-", "s--", "^:", "D-."), strict=False
    )
    for (name, points), colour, line in looks:
        label = labels.get(name, f"sampled ({name.removeprefix('val/')})")
        axes.plot(*zip(*points, strict=True), line, color=colour, label=label, markersize=5)
    axes.set_title(f"Held-out accuracy: {_from_to(next(iter(curves.values())))}")
    axes.set(ylim=(-0.02, 1.02), ylabel="accuracy")
    axes.legend(loc="lower right")


def _draw_reward(axes: Axes, rounds: Sequence[Mapping[str, float]]) -> None:
    drawn = [r for r in rounds if math.isfinite(r["reward"])]
    steps, rewards = [r["step"] for r in drawn], [r["reward"] for r in drawn]
    window = max(1, len(drawn) // 10)
    if window == 1:
        axes.plot(steps, rewards, "o-", color=GREEN, markersize=4, label="each round")
    else:
        axes.plot(steps, rewards, "o", color=GREEN, alpha=0.35, markersize=4, label="each round")
        half = window // 2
        means = [
            statistics.fmean(rewards[max(0, i - half) : i + half + 1]) for i in range(len(drawn))
        ]
        label = f"mean of {2 * half + 1} rounds"
        axes.plot(steps, means, "-", color=GREEN, linewidth=2, label=label)
    axes.set_ylabel("reward")
    if drawn:
        way = _from_to(list(zip(steps, rewards, strict=True)))
        axes.set_title(f"Reward of the training rollouts: {way}")
        axes.legend(loc="lower right")


def _from_to(points: Sequence[tuple[float, float]]) -> str:
    """From the untrained model's figure to the last; the last alone where that was not measured."""
    (step, first), (_, last) = points[0], points[-1]
    if step > 0:
        return f"{last:.2f} at the end"
    return f"{first:.2f} to {last:.2f}" if len(points) > 1 else f"{first:.2f} before training"


def _whole_numbers(most: int) -> MaxNLocator:
    return MaxNLocator(nbins=most, steps=[1, 2, 5, 10], integer=True)


def _bar(slot: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = slot - 0.44, slot + 0.44
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _every_second(spans: Mapping[str, Sequence[Any]]) -> list[bool]:
    """Whether a span is its slot's second, fourth, ...: neighbours get another shade."""
    seen: Counter[int] = Counter()
    flags = []
    for slot in spans["slot"]:
        flags.append(seen[slot] % 2 == 1)
        seen[slot] += 1
    return flags


def _lighter(colour: str) -> tuple[float, ...]:
    return tuple(0.65 * channel + 0.35 for channel in to_rgb(colour))


def _mark_percentiles(axes: Axes, marks: Mapping[str, int]) -> None:
    """Lines with labels at different heights, so that close ones do not cover each other."""
    names: dict[int, str] = {}
    for name, value in marks.items():
        names[value] = f"{names[value]}, {name}" if value in names else name
    low, high = axes.get_xlim()
    axes.set_xlim(low, high)
    for (value, name), height in zip(names.items(), (0.98, 0.91, 0.84), strict=False):
        x = axes.transAxes.inverted().transform(axes.transData.transform((value, 0)))[0]
        axes.axvline(value, ymax=height, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            f"{name} = {value}",
            (value, height),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if x > 0.8 else 4, 0),
            textcoords="offset points",
            ha="right" if x > 0.8 else "left",
            va="top",
            fontsize=10,
        )
