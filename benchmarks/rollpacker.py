"""Seconds and decode steps to reach an accuracy on the quick task with RollPacker's parts.

    python -m benchmarks run rollpacker --seeds 0 1 2

Uses vLLM. Seconds are wall-clock seconds of rollouts and updates, without validation and start-up.
The variants of a seed run one after another, and nothing else should run meanwhile. Accuracy is the
mean over the seeds, measured every few rounds. Runs are kept in `--out` by commit and not repeated.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import results
from benchmarks.learning import Variant, logged, train
from benchmarks.selection import CPUSeconds, last, reached

OWN_PROCESS = ("--data.engine=ProcessEngine", "--data.engine.engine=VLLMEngine")
TAIL = ("--trainer.callbacks+=TailBatching",)
STREAMED = ("--trainer.callbacks+=StreamedTraining",)
TIMEOUTS = ("--trainer.callbacks+=AdaptiveTimeouts",)

VARIANTS = {
    "synchronous": Variant("synchronous"),
    "rollpacker": Variant(
        "TailBatching, StreamedTraining, AdaptiveTimeouts",
        (*OWN_PROCESS, *TAIL, *STREAMED, *TIMEOUTS),
    ),
    "losers": Variant(
        "the same, losers go on",
        (
            *OWN_PROCESS,
            *TAIL,
            "--trainer.callbacks.prompt_ratio=1.5",
            "--trainer.callbacks.max_deferrals=8",
            *STREAMED,
            *TIMEOUTS,
        ),
    ),
    "tail": Variant("TailBatching", TAIL),
    "streamed": Variant("StreamedTraining", (*OWN_PROCESS, *STREAMED)),
}
EVERY = 5
"""Rounds between two evaluations."""
SETTINGS = (
    "--data.val_greedy=false",
    f"--trainer.check_val_every_n_epoch={EVERY}",
    "--trainer.callbacks+=benchmarks.rollpacker.Seconds",
)


class Seconds(CPUSeconds):
    """Log `seconds`: wall-clock time of rollouts and updates so far, without validation."""

    metric = "seconds"
    clock = staticmethod(time.perf_counter)


@dataclass(frozen=True)
class Progress:
    """Time, decode steps and accuracy of a run at each evaluation."""

    accuracy: list[float]
    seconds: list[float]
    decode_steps: list[float]
    gradient_seconds: float
    """Seconds of gradients during rollouts."""
    overlap_seconds: float
    """The part of these seconds in which the engine decoded."""


def read(folder: Path) -> Progress:
    """Read what a run logged."""
    accuracy, seconds, steps = [], [0.0], [0.0]
    work = overlap = 0.0
    for row in logged(folder):
        if row.get("val/accuracy"):
            accuracy.append(float(row["val/accuracy"]))
        if row.get("rollout/decode_steps"):
            steps.append(steps[-1] + float(row["rollout/decode_steps"]))
        if row.get("seconds"):
            seconds.append(float(row["seconds"]))
        if row.get("streamed_training/gradient_seconds"):
            work += float(row["streamed_training/gradient_seconds"])
            overlap += float(row["streamed_training/overlap_seconds"])
    return Progress(accuracy, seconds[::EVERY], steps[::EVERY], work, overlap)


def average(runs: Sequence[Progress]) -> Progress:
    """Return the means over the seeds for each evaluation."""
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(Progress)):
        values = [getattr(run, name) for run in runs]
        lists = isinstance(values[0], list)
        columns[name] = [fmean(v) for v in zip(*values, strict=True)] if lists else fmean(values)
    return Progress(**columns)


def table(runs: dict[str, list[Progress]], share: float) -> str:
    """Return Markdown: cost of each variant to reach a share of the first one's best accuracy."""
    means = {name: average(of) for name, of in runs.items()}
    first = next(iter(means.values()))
    target = share * max(first.accuracy)
    lines = [
        f"{share:.0%} of the best mean accuracy of the synchronous runs: {target:.3f}\n",
        "| | accuracy at the end, by seed | mean | seconds to the target | ratio "
        "| decode steps to the target | ratio | seconds in all | gradient seconds during rollouts "
        "| while the engine decoded |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, mean in means.items():
        final = [run.accuracy[-1] for run in runs[name]]
        cells = [" / ".join(f"{a:.2f}" for a in final), f"{fmean(final):.3f}"]
        for column in ("seconds", "decode_steps"):
            own = reached(mean.accuracy, getattr(mean, column), target)
            plain = reached(first.accuracy, getattr(first, column), target)
            ratio = f"{plain / own:.2f}" if plain and own else ""
            cells += ["not reached" if own is None else f"{own:,.0f}", ratio]
        cells += [f"{mean.seconds[-1]:,.0f}"]
        cells += [f"{mean.gradient_seconds:.0f}", f"{mean.overlap_seconds:.0f}"]
        lines.append(f"| {VARIANTS[name].name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that are missing and print the table."""
    parser = results.parser("rollpacker", __doc__)
    parser.add_argument("--rounds", type=int, default=40, help="rounds per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["synchronous", "rollpacker", "losers"],
        choices=VARIANTS,
        help="variants to train",
    )
    parser.add_argument("--share", type=float, default=0.95, help="share of the best accuracy")
    parser.add_argument("--out", type=Path, default=Path("runs/rollpacker"), help="folder for runs")
    options = results.parse(parser, arguments)
    runs: dict[str, list[Progress]] = {name: [] for name in options.variants}
    for seed in options.seeds:
        for name in options.variants:
            settings = (*SETTINGS, *VARIANTS[name].arguments)
            progress = read(train(name, settings, seed, options.rounds, options.out))
            runs[name].append(progress)
            results.add(f"{name}, seed {seed}", last(progress))
    print(table(runs, options.share))


if __name__ == "__main__":
    main()
