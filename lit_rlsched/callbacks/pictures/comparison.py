"""Picture of several runs beside each other, from the metrics in their folders."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlsched.callbacks.pictures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    figure_of,
)
from lit_rlsched.run.record import measured
from lit_rlsched.run.saving.run_folder import names_of
from lit_rlsched.settings import UsageError

Row = dict[str, float]
ROUND, TIME = "rollout/round", "time/total"
PANELS = {
    "reward": ("Mean reward of the training completions", "reward"),
    "val/accuracy": ("Held-out accuracy", "share of correct answers"),
    "completions/mean_length": ("Mean length of the training completions", "tokens"),
    "seconds": ("From the end of the last rollout to the end of this one", "seconds"),
}
"""Title and unit of each row of panels."""
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, BLACK, GREY)


def compare(runs: Sequence[str | Path], out: str | Path = "comparison.png") -> Path:
    """Draw runs beside each other: reward, accuracy, length and seconds, over rounds and time.

    Args:
        runs: Folders of runs, such as `runs/quickstart/version_0`.
        out: File of the picture; its ending decides the format (png, svg, pdf).

    Returns:
        The file.

    Raises:
        UsageError: a folder is no run, or the format is unknown.
    """
    if Path(out).suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"`out={out}`: use a name in .png, .svg or .pdf.")
    folders = [Path(run) for run in runs]
    pairs = zip(names_of(folders), folders, strict=True)
    figure = comparison({name: read_run(folder) for name, folder in pairs})
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return Path(out)


def read_run(folder: Path) -> list[Row]:
    """Return the rows of a run's `metrics.csv` that belong to rounds and validations.

    A resumed run has several files; what a later one repeats is taken from there.

    Raises:
        UsageError: the folder is no run, or one without a round.
    """
    files = [*folder.glob("metrics.csv"), *folder.glob("metrics/version_*/metrics.csv")]
    if not files:
        inner = sorted(str(path.parents[2]) for path in folder.glob("*/metrics/*/metrics.csv"))
        use = f"one of the runs in it, such as `{inner[-1]}`" if inner else "the folder of a run"
        raise UsageError(f"`{folder}` is no run: it has no `metrics/*/metrics.csv`. Name {use}.")
    rows: list[Row] = []
    for file in sorted(
        files, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-2])]
    ):
        with file.open(encoding="utf-8", newline="") as text:
            found = [_numbers(row) for row in csv.DictReader(text)]
        found = [row for row in found if ROUND in row and TIME in row]
        first = min((row[ROUND] for row in found if "reward" in row), default=math.inf)
        rows = [row for row in rows if row[ROUND] < first] + found
    rounds = [row for row in rows if "reward" in row]
    if not rounds:
        raise UsageError(f"`{folder}` is a run without a round: there is nothing to compare yet.")
    for before, row in pairwise(rounds):
        row["seconds"] = row[TIME] - before[TIME]
    return rows


def _numbers(row: Mapping[str, str]) -> Row:
    """Return the figures of a row; none of a row that a kill has cut."""
    try:
        return {name: float(value) for name, value in row.items() if value}
    except (ValueError, TypeError):
        return {}


def comparison(runs: Mapping[str, Sequence[Row]]) -> Figure:
    """Plot what the runs measured over rounds, and over minutes beside it.

    Args:
        runs: Rows of `read_run` by the run's name.
    """
    shown = [key for key in PANELS if any(key in row for rows in runs.values() for row in rows)]
    with figure_of(13.0, 1.0 + 2.9 * len(shown) + 0.25 * len(runs)) as figure:
        panels = figure.subplots(len(shown), 2, squeeze=False, sharey="row", sharex="col")
        for key, (left, right) in zip(shown, panels, strict=True):
            title, unit = PANELS[key]
            left.set(title=title, ylabel=unit)
            for colour, (name, rows) in zip(cycle(COLOURS), runs.items(), strict=False):
                for axes, at, scale in ((left, ROUND, 1.0), (right, TIME, 60.0)):
                    _draw(axes, [(x / scale, y) for x, y in measured(rows, key, at)], colour, name)
        panels[-1][0].set_xlabel("round")
        panels[-1][1].set_xlabel("minutes since the run began")
        handles, labels = panels[0][0].get_legend_handles_labels()  # every run has a reward
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
    return figure


def _draw(axes: Axes, points: Sequence[tuple[float, float]], colour: str, name: str) -> None:
    """Draw a curve; of one with many points their running mean, and the points behind it."""
    if not points:
        return
    xs, ys = zip(*points, strict=True)
    if half := len(points) // 20:
        axes.plot(xs, ys, "o", color=colour, alpha=0.2, markersize=3)
        ys = tuple(fmean(ys[max(0, i - half) : i + half + 1]) for i in range(len(ys)))
    axes.plot(xs, ys, "-" if half else "o-", color=colour, markersize=4, label=name)
