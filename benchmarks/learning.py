"""Accuracy on the quick task and decode slot-steps with the modes of SortedRL.

    python -m benchmarks run learning --rounds 60 --seeds 0 1 2
    python -m benchmarks run learning --rounds 200 --seeds 0 1 2 --variants partial

Each seed but 0 starts from its own warm start, made by `examples/countdown/warm_start.py`. Runs are
kept in `--out` by commit and not repeated.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import results

QUICK = "configs/quickstart.yaml"
SORTED = ("--trainer.callbacks+=SortedBatching", "--trainer.callbacks.pool_rounds=4")
PARTIAL = (*SORTED, "--trainer.callbacks.mode=partial")
SINGLE = ("--model.advantage=reinforce++",)
GROUPS_OF_4 = ("--data.prompts_per_round=64", "--data.num_generations=4")
TRAINER = "--model.old_logprobs=trainer"
UNCORRECTED = (TRAINER, "--model.importance_sampling_mode=null")
TRUNCATED = (TRAINER, "--model.importance_sampling_mode=token_truncate")


@dataclass(frozen=True)
class Variant:
    """Settings to compare."""

    name: str
    arguments: tuple[str, ...] = ()


VARIANTS = {
    "synchronous": Variant("synchronous"),
    "on_policy": Variant("on-policy", SORTED),
    "single_synchronous": Variant("synchronous, reinforce++", SINGLE),
    "single_on_policy": Variant("on-policy, reinforce++", (*SORTED, *SINGLE)),
    "4_synchronous": Variant("synchronous, groups of 4", GROUPS_OF_4),
    "4_on_policy": Variant("on-policy, groups of 4", (*SORTED, *GROUPS_OF_4)),
    "partial_ratio": Variant("partial (clipped ratio)", PARTIAL),
    "partial_uncorrected": Variant("partial, uncorrected", (*PARTIAL, *UNCORRECTED)),
    "partial_truncated": Variant("partial, truncated IS", (*PARTIAL, *TRUNCATED)),
    "partial_stale_1": Variant(
        "partial, truncated IS, max_staleness=1",
        (*PARTIAL, "--trainer.callbacks.max_staleness=1", *TRUNCATED),
    ),
}


@dataclass(frozen=True)
class Curve:
    """Logged figures of a run: by round, and accuracy by optimizer step."""

    accuracy: list[tuple[int, float]]
    rounds: list[dict[str, float]]

    def total(self, name: str) -> float:
        """Return the sum of a figure over the rounds."""
        return sum(r[name] for r in self.rounds)


def train(
    name: str,
    arguments: Sequence[str],
    seed: int,
    rounds: int,
    out: Path,
    config: str = QUICK,
) -> Path:
    """Run a configuration with additional arguments and return the folder of the run.

    A completed run is not repeated with the same commit and arguments. On the quick task each seed
    but 0 starts from a warm start of its own.
    """
    folder = out / results.commit() / f"{name}_{rounds}_{seed}"
    arguments = [
        *("-c", config, f"--seed_everything={seed}"),
        *(f"--trainer.max_epochs={rounds}", f"--trainer.default_root_dir={folder}"),
        *("--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"),
        *("--trainer.logger.name=metrics", "--trainer.logger.version=all"),
        *arguments,
    ]
    model = Path(f"runs/warm_start_{seed}")
    if warm := seed and config == QUICK:
        arguments.append(f"--model.model={model}")
    done, ran = folder / "done", "\n".join(arguments)
    if done.exists() and done.read_text() == ran:
        return folder
    if warm and not model.exists():
        script = [sys.executable, "examples/countdown/warm_start.py", "--seed", str(seed)]
        subprocess.run([*script, "--out", model], check=True)
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was stopped
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "lit_rlsched", "fit", *arguments]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    equal = [r["frac_reward_zero_std"] for r in logged(folder)]
    results.check_rewards_differ([float(share) for share in equal if share], name)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes of a chat model
    done.write_text(ran)
    return folder


TOTALS = ("slot_steps", "idle_slot_steps", "decode_steps", "tokens", "discarded_tokens")
"""Metrics `rollout/*` that are summed over the rounds."""


def logged(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a run's metrics."""
    with (folder / "metrics" / "all" / "metrics.csv").open() as file:
        yield from csv.DictReader(file)


def read(folder: Path) -> Curve:
    """Read what a run logged."""
    accuracy, rounds = [], []
    for row in logged(folder):
        if row.get("val/accuracy"):
            accuracy.append((int(row["step"]), float(row["val/accuracy"])))
        if row.get("rollout/slot_steps"):
            rounds.append({k: float(v) for k, v in row.items() if v})
    return Curve(accuracy, rounds)


def table(curves: dict[str, list[Curve]]) -> str:
    """Return a Markdown row for each variant, with means over the seeds."""
    lines = [
        "| | held-out accuracy at the end, by seed | mean | decode slot-steps | against the first "
        "| decode steps | useful tokens | bubble ratio | trained over drawn length |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = None
    for name, runs in curves.items():
        final = [run.accuracy[-1][1] for run in runs]
        slot_steps = fmean(run.total("rollout/slot_steps") for run in runs)
        first = first or slot_steps
        idle = fmean(run.total("rollout/idle_slot_steps") for run in runs)
        discarded = fmean(run.total("rollout/discarded_tokens") for run in runs)
        tokens = fmean(run.total("rollout/tokens") for run in runs)
        pools = [
            r["pool/trained_over_drawn_length"]
            for run in runs
            for r in run.rounds
            if "pool/trained_over_drawn_length" in r
        ]
        lines.append(
            f"| {VARIANTS[name].name} | {' / '.join(f'{a:.2f}' for a in final)} | "
            f"{fmean(final):.3f} | {slot_steps:,.0f} | {slot_steps / first - 1:+.0%} | "
            f"{fmean(run.total('rollout/decode_steps') for run in runs):,.0f} | "
            f"{1 - discarded / tokens:.0%} | {idle / slot_steps:.2f} | {fmean(pools):.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that are missing and print the table."""
    parser = results.parser("learning", __doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["synchronous", "on_policy"],
        help="names of variants, or how they begin",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder for runs")
    options = results.parse(parser, arguments)
    wanted = [v for v in VARIANTS if any(v.startswith(w) for w in options.variants)]
    jobs = [(variant, seed) for seed in options.seeds for variant in wanted]
    args = [(v, VARIANTS[v].arguments, s, options.rounds, options.out) for v, s in jobs]
    with ThreadPoolExecutor(options.workers) as pool:
        folders = list(pool.map(train, *zip(*args, strict=True)))
    curves: dict[str, list[Curve]] = {variant: [] for variant in wanted}
    for (variant, seed), folder in zip(jobs, folders, strict=True):
        curve = read(folder)
        curves[variant].append(curve)
        figures = {"accuracy": curve.accuracy[-1][1]}
        figures |= {figure: curve.total(f"rollout/{figure}") for figure in TOTALS}
        results.add(f"{variant}, seed {seed}", figures)
    print(table(curves))


if __name__ == "__main__":
    main()
