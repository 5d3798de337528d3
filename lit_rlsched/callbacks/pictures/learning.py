"""Picture of what a run has learned so far."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlsched.callbacks.pictures.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    figure_of,
    whole_numbers,
)
from lit_rlsched.run.record import from_to, measured
from lit_rlsched.text import counted

Points = Sequence[tuple[float, float]]
PANELS = {
    "reward": ("Mean reward of the training completions", "reward", GREEN),
    "completions/mean_length": ("Mean length of the training completions", "tokens", ORANGE),
    "kl": ("KL divergence from the reference model", "nats per token", RED),
    "entropy": ("Entropy of the policy", "nats per token", PURPLE),
}
"""Title, unit and colour of each figure of a round."""


def learning_curve(
    name: str,
    rounds: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, float]],
) -> Figure:
    """Plot held-out accuracy and the figures of rounds that there are, beside each other.

    Args:
        name: The run's name.
        rounds: Rows of `RunRecord.rounds`.
        validations: Rows of `RunRecord.validations`.
    """
    accuracies = _accuracy_curves(rounds, validations)
    curves = {key: measured(rounds, key, "round") for key in PANELS}
    shown = [
        *(["accuracy"] if accuracies else []),
        *(k for k in PANELS if curves[k] or k == "reward"),
    ]
    cells = shown[: len(shown) % 2] + shown  # of an odd number the first takes a whole row
    grid = [cells[i : i + 2] for i in range(0, len(cells), 2)]
    with figure_of(11.0 if len(shown) > 1 else 8.0, 0.6 + 3.3 * len(grid)) as figure:
        axes: dict[str, Axes] = figure.subplot_mosaic(grid, sharex=True)
        if accuracies:
            _draw_accuracy(axes["accuracy"], accuracies)
        for key in shown:
            if key in PANELS:
                _draw_rounds(axes[key], curves[key], *PANELS[key])
        for key in dict.fromkeys(grid[-1]):
            axes[key].set_xlabel("round")
        for one in axes.values():
            one.xaxis.set_major_locator(whole_numbers(10))
            one.tick_params(labelbottom=True)
        done = int(rounds[-1]["round"])
        figure.suptitle(f"{name}, {counted(done, 'round')}", x=0.01, ha="left", size=14)
    return figure


def _accuracy_curves(
    rounds: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, float]]
) -> dict[str, Points]:
    """Return points by label: sampled and greedy accuracy, else plain accuracy."""
    names = sorted({name for metrics in validations for name in metrics})
    labels = {
        n: f"{n.removeprefix('val/mean@')} samples of each prompt ({n.removeprefix('val/')})"
        for n in names
        if n.startswith("val/mean@")
    }
    if "val/greedy_accuracy" in names:
        labels["val/greedy_accuracy"] = "greedy decoding"
    labels = labels or {"val/accuracy": "accuracy"}

    def trained(step: float) -> int:
        """Return the number of rounds that were trained on before an optimizer step."""
        return max((int(r["round"]) for r in rounds if r["step"] < step), default=0)

    curves = {label: measured(validations, name) for name, label in labels.items()}
    return {
        label: [(trained(step), value) for step, value in points]
        for label, points in curves.items()
        if points
    }


def _draw_accuracy(axes: Axes, curves: Mapping[str, Points]) -> None:
    looks = zip((BLUE, RED, GREEN, ORANGE), ("o-", "s--", "^:", "D-."), strict=True)
    for (label, points), (colour, line) in zip(curves.items(), looks, strict=False):
        axes.plot(*zip(*points, strict=True), line, color=colour, label=label, markersize=5)
    axes.set_title(f"Held-out accuracy: {from_to(next(iter(curves.values())))}")
    axes.set(ylim=(-0.02, 1.02), ylabel="share of correct answers")
    axes.legend(loc="best", fontsize=10)


def _draw_rounds(axes: Axes, points: Points, title: str, unit: str, colour: str) -> None:
    axes.set(title=title, ylabel=unit)
    if not points:
        return
    rounds, values = zip(*points, strict=True)
    half = len(points) // 20
    if half:
        axes.plot(rounds, values, "o", color=colour, alpha=0.3, markersize=4, label="each round")
        windows = [values[max(0, i - half) : i + half + 1] for i in range(len(points))]
        means = [statistics.fmean(window) for window in windows]
        label = f"mean of {2 * half + 1} rounds"
        axes.plot(rounds, means, "-", color=colour, linewidth=2, label=label)
        axes.legend(loc="best", fontsize=10)
    else:
        axes.plot(rounds, values, "o-", color=colour, markersize=4)
    axes.margins(y=0.1)
