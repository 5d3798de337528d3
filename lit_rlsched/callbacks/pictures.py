"""Pictures of a run, as matplotlib figures."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from lit_rlsched.callbacks.run_curve import RunCurve, from_to, measured
from lit_rlsched.run_folder import folder_of
from lit_rlsched.training.round import Round

# the colours of Okabe and Ito, which colour-blind readers can tell apart
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
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
}


def draw(curve: RunCurve) -> dict[str, Figure]:
    """Return all pictures that there is data for, by name."""
    figures, last = {}, curve.last
    if curve.rounds:
        figures["learning"] = learning_curve(curve.rounds, curve.validations)
    if last is not None:
        figures["lengths"] = length_histogram(last)
        if last.trace is not None and last.trace.steps:
            figures["timeline"] = slot_timeline(last)
    return figures


def publish(figures: Mapping[str, Figure], trainer: Trainer) -> None:
    """Save pictures in the run's folder, and send them to W&B and TensorBoard."""
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
    """Plot reward, and held-out accuracy where there is any, over optimizer steps.

    Args:
        rounds: `step` and `reward` of each round.
        validations: `step` and the `val/` metrics of each validation.
    """
    curves = _accuracy_curves(validations)
    with _figure(8.0, 6.2 if curves else 3.8) as figure:
        axes = figure.subplots(2 if curves else 1, sharex=True, squeeze=False)[:, 0]
        if curves:
            _draw_accuracy(axes[0], curves)
        _draw_reward(axes[-1], measured(rounds, "reward"))
        axes[-1].set_xlabel("optimizer steps")
        axes[-1].xaxis.set_major_locator(_whole_numbers(10))
    return figure


def _accuracy_curves(
    validations: Sequence[Mapping[str, float]],
) -> dict[str, list[tuple[float, float]]]:
    """Return points by label: sampled and greedy accuracy, else plain accuracy."""
    names = sorted({name for metrics in validations for name in metrics})
    labels = {n: f"sampled ({n.removeprefix('val/')})" for n in names if n.startswith("val/mean@")}
    if "val/greedy_accuracy" in names:
        labels["val/greedy_accuracy"] = "greedy"
    labels = labels or {"val/accuracy": "accuracy"}
    curves = {label: measured(validations, name) for name, label in labels.items()}
    return {label: points for label, points in curves.items() if points}


def _draw_accuracy(axes: Axes, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    looks = zip((BLUE, RED, GREEN, ORANGE), ("o-", "s--", "^:", "D-."), strict=True)
    for (label, points), (colour, line) in zip(curves.items(), looks, strict=False):
        axes.plot(*zip(*points, strict=True), line, color=colour, label=label, markersize=5)
    axes.set_title(f"Held-out accuracy: {from_to(next(iter(curves.values())))}")
    axes.set(ylim=(-0.02, 1.02), ylabel="accuracy")
    axes.legend(loc="lower right")


def _draw_reward(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    axes.set_ylabel("reward")
    if not points:
        return
    steps, rewards = zip(*points, strict=True)
    half = len(points) // 20
    if half:
        axes.plot(steps, rewards, "o", color=GREEN, alpha=0.35, markersize=4, label="each round")
        windows = [rewards[max(0, i - half) : i + half + 1] for i in range(len(points))]
        means = [statistics.fmean(window) for window in windows]
        label = f"mean of {2 * half + 1} rounds"
        axes.plot(steps, means, "-", color=GREEN, linewidth=2, label=label)
    else:
        axes.plot(steps, rewards, "o-", color=GREEN, markersize=4, label="each round")
    axes.set_title(f"Reward of the training rollouts: {from_to(points)}")
    axes.legend(loc="lower right")


def slot_timeline(round: Round) -> Figure:
    """Plot what each slot decoded when, and how many slots were in use.

    Raises:
        ValueError: the round has no trace.
    """
    trace = round.trace
    if trace is None:
        raise ValueError(f"Round {round.number} has no trace: it comes from a checkpoint.")
    spans = trace.spans
    finishes = {sample.id: sample.completion.finish_reason for sample in round.samples}
    counts: Counter[str | None] = Counter(
        finishes.get(request) for request in set(spans["request"])
    )
    legend = [
        Patch(color=colour, label=f"{label} ({counts[reason]})")
        for reason, (label, colour) in FINISHES.items()
        if counts[reason]
    ]
    with _figure(9.0, 6.0) as figure:
        slots, count = figure.subplots(2, sharex=True, height_ratios=[3, 1])
        bars = defaultdict(list)
        columns = (spans[name] for name in ("slot", "start", "end", "request"))
        for slot, start, end, request in zip(*columns, strict=True):
            colour = FINISHES[finishes.get(request)][1]
            bars[slot].append(((start, end - start), colour))
        for slot, own in bars.items():  # an artist per slot: one per span would take seconds
            times, colours = zip(*own, strict=True)
            edge = 0.3 if trace.slots <= 64 else 0
            slots.broken_barh(
                times, (slot - 0.44, 0.88), facecolors=colours, edgecolors="white", linewidth=edge
            )
        for start, end in trace.work:
            count.axvspan(start, end, color=GREEN, alpha=0.35, linewidth=0, zorder=3)
        if trace.work:
            label = f"the trainer computes gradients ({trace.work_seconds:.3g} s)"
            legend.append(Patch(color=GREEN, alpha=0.35, label=label))
        slots.set(ylim=(trace.slots - 0.5, -0.5), ylabel="slot")
        slots.yaxis.set_major_locator(_whole_numbers(8))
        slots.grid(False)
        slots.set_title(
            f"Round {round.number}: {len(set(spans['request']))} completions, "
            f"Q = {trace.slots} slots, {trace.seconds:.3g} s, bubble ratio {trace.bubble_ratio:.2f}"
        )
        figure.legend(handles=legend, loc="outside lower center", ncols=3)

        ends = [0.0, *trace.steps["end"]]
        running = np.array(trace.steps["running"], float)
        full = np.full_like(running, trace.slots)
        count.stairs(running, ends, fill=True, color=GREY)
        count.stairs(full, ends, baseline=running, fill=True, color=ORANGE, alpha=0.4)
        count.set(
            xlim=(0, trace.seconds or 1),
            ylim=(0, trace.slots * 1.05),
            xlabel="seconds since the first decode step",
            ylabel="running",
        )
        count.yaxis.set_major_locator(_whole_numbers(4))
        mean = (1 - trace.bubble_ratio) * trace.slots
        count.set_title(
            f"{mean:.3g} of {trace.slots} slots run on average (grey), the rest idle", size=11
        )
    return figure


def length_histogram(round: Round) -> Figure:
    """Plot the round's completion lengths; the axis is logarithmic if a few are much longer."""
    lengths = np.array([len(c.token_ids) for c in round.completions])
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").tolist()
    skewed = lengths.min() > 0 and p99 > 5 * p50
    low, high = lengths.min(), max(lengths.max(), lengths.min() + 1)
    edges = np.geomspace(low, high, 41) if skewed else np.linspace(low, high, 41)
    parts = {
        reason: [len(c.token_ids) for c in round.completions if c.finish_reason == reason]
        for reason in FINISHES
    }
    present = [reason for reason in FINISHES if parts[reason]]
    with _figure(8.0, 4.2) as figure:
        axes = figure.subplots()
        axes.hist(
            [parts[reason] for reason in present],
            bins=edges.tolist(),
            stacked=True,
            color=[FINISHES[reason][1] for reason in present],
            label=[f"{FINISHES[reason][0]} ({len(parts[reason])})" for reason in present],
            edgecolor="white",
            linewidth=0.4,
        )
        axes.margins(y=0.22)  # room for the labels of the percentiles
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


def _mark_percentiles(axes: Axes, marks: Mapping[str, int]) -> None:
    """Draw labelled lines; labels have different heights because lines may be close."""
    names: dict[int, str] = {}
    for name, value in marks.items():
        names[value] = f"{names[value]}, {name}" if value in names else name
    for (value, name), height in zip(names.items(), (0.98, 0.91, 0.84), strict=False):
        axes.axvline(value, ymax=height, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            f"{name} = {value}",
            (value, height),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=10,
        )


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """Yield a figure in our style, unknown to pyplot and without changing its global settings."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=130)


def _whole_numbers(bins: int) -> MaxNLocator:
    return MaxNLocator(nbins=bins, steps=[1, 2, 5, 10], integer=True)
