"""Cost of reaching plain GRPO's accuracy, by what is drawn and what is trained on.

    python -m benchmarks run selection --seeds 0 1 2 3 4
    python -m benchmarks run selection --task again --share 0.95 --variants full half_both

`once` is the quick task: each round draws 32 prompts with 16 completions and trains on 4 of them.
In the other tasks each prompt comes again, and 8 completions of it are trained on; `half_` is half
the prompts in each round. `again` is the quick task with 400 prompts; `levels` has the levels of
`reasoning_gym`'s countdown from 2 to 5 numbers; in `chat` the chat model learns 50 sums and
products of small numbers (first `make real-model`).

Accuracy is the mean over the seeds, measured every few rounds. CPU seconds are those of the
trainer's process in rollouts and updates. GRPO with 4 completions per prompt runs three times as
many rounds. Runs are kept in `--out` by commit and not repeated.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from lightning import LightningModule, Trainer

from benchmarks import results
from benchmarks.learning import QUICK, Variant, logged, train
from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.run.trainer import log_now

KEPT = 4
AGAIN = "--data.train_data.init_args.size=400"
LEVELS = (
    f"--data.{of}_data.init_args.numbers={{2: 1, 3: 1, 4: 1, 5: 1}}" for of in ("train", "val")
)
TASKS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "once": (QUICK, 32, ("--data.num_generations=16",)),
    "again": (QUICK, 32, (AGAIN,)),
    "levels": (QUICK, 32, (AGAIN, *LEVELS)),
    "chat": ("configs/smollm2.yaml", 16, ()),
}
"""Configuration of each task, prompts of a round, and further arguments."""
SKIP, BUDGET = ("--trainer.callbacks+=PromptChoice",), ("--trainer.callbacks+=PromptBudget",)
CHOICE = (*SKIP, "--trainer.callbacks.rule=thompson")
DYNAMIC = ("--trainer.callbacks+=DynamicSampling",)
EVERY = 5
"""Rounds between two evaluations."""


def _select(rule: str, *more: str) -> tuple[str, ...]:
    chosen = (f"--trainer.callbacks.keep={KEPT}", f"--trainer.callbacks.rule={rule}")
    return ("--trainer.callbacks+=DownSampling", *chosen, *more)


VARIANTS = {
    "full": Variant("GRPO, all trained on"),
    "max_variance": Variant("max_variance", _select("max_variance")),
    "random": Variant("random", _select("random")),
    "percentile": Variant("percentile", _select("percentile")),
    "max_reward": Variant("max_reward", _select("max_reward")),
    "few": Variant(f"GRPO, {KEPT} drawn", (f"--data.num_generations={KEPT}",)),
    "early_stop": Variant(
        "max_variance, early stop", _select("max_variance", "--trainer.callbacks.early_stop=true")
    ),
    "dynamic": Variant("DynamicSampling", DYNAMIC),
    "skip_dynamic": Variant("PromptChoice, DynamicSampling", (*SKIP, *DYNAMIC)),
    "choice": Variant("PromptChoice, thompson", CHOICE),
    "skip": Variant("PromptChoice", SKIP),
    "budget": Variant("PromptBudget", BUDGET),
    "both": Variant("PromptChoice, thompson, PromptBudget", (*CHOICE, *BUDGET)),
    "tracker": Variant("PromptChoice, thompson, tracker", (*CHOICE, "--model.advantage=tracker")),
}
VARIANTS |= {
    f"half_{name}": Variant(f"{of.name}, half the prompts", of.arguments)
    for name, of in VARIANTS.items()
}
SETTINGS = (
    "--data.val_greedy=false",
    f"--trainer.check_val_every_n_epoch={EVERY}",
    "--trainer.callbacks+=benchmarks.selection.CPUSeconds",
)


class CPUSeconds(RolloutCallback):
    """Log `cpu_seconds`: CPU time of rollouts and updates so far, without validation."""

    metric = "cpu_seconds"
    clock = staticmethod(time.process_time)

    def __init__(self) -> None:
        self._total = self._since = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._since = self.clock()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Add the time since the round began or the last optimizer step."""
        now = self.clock()
        self._total, self._since = self._total + now - self._since, now
        log_now(trainer, {self.metric: self._total})


Progress = dict[str, list[float]]
"""Accuracy of a run and what it has cost, at each evaluation."""
Runs = dict[str, list[Progress]]


def read(folder: Path) -> Progress:
    """Read what a run logged."""
    accuracy, cpu, trained, tokens = [], [0.0], [0.0], [0.0]
    for row in logged(folder):
        if row.get("val/accuracy"):
            accuracy.append(float(row["val/accuracy"]))
        if row.get("batch/completions"):
            trained.append(trained[-1] + float(row["batch/completions"]))
            tokens.append(tokens[-1] + float(row["rollout/tokens"]))
        if row.get("cpu_seconds"):  # logged at each optimizer step; keep the last one of a round
            cpu[len(trained) - 1 :] = [float(row["cpu_seconds"])]
    costs = {"rounds": [float(n) for n in range(len(trained))], "drawn_tokens": tokens}
    costs |= {"trained": trained, "cpu_seconds": cpu}
    return {"accuracy": accuracy} | {name: values[::EVERY] for name, values in costs.items()}


def mean(runs: Sequence[Progress], column: str) -> list[float]:
    """Return the means of a column over the seeds for each evaluation."""
    return [fmean(values) for values in zip(*(r[column] for r in runs), strict=True)]


def cost(runs: Runs, name: str, target: float, column: str) -> float:
    """Return the cost at which the mean accuracy of a variant reached `target`; NaN if it did not.

    It is interpolated between evaluations.
    """
    accuracy, spent = mean(runs[name], "accuracy"), mean(runs[name], column)
    for i, value in enumerate(accuracy):
        if value >= target:
            if i == 0:
                return spent[0]
            share = (target - accuracy[i - 1]) / (value - accuracy[i - 1])
            return spent[i - 1] + share * (spent[i] - spent[i - 1])
    return math.nan


def ratio(runs: Runs, name: str, reference: str, share: float, column: str) -> float:
    """Return the cost of a variant over that of `reference`, NaN where one does not get there.

    Cost of the rounds until the mean accuracy is a share of `reference`'s best.
    """
    target = share * max(mean(runs[reference], "accuracy"))
    return cost(runs, name, target, column) / cost(runs, reference, target, column)


def with_jackknife(of: Callable[[Runs], float], runs: Runs, digits: int = 2) -> str:
    """Return a figure of the runs and, where it has one, its standard error over the seeds."""
    value, n = of(runs), min(map(len, runs.values()))
    if math.isnan(value):
        return "not reached"
    parts = [of({v: r[:i] + r[i + 1 :] for v, r in runs.items()}) for i in range(n)]
    error = math.sqrt((n - 1) * pvariance(parts)) if n > 1 else math.nan
    return f"{value:,.{digits}f}" + ("" if math.isnan(error) else f" ± {error:,.{digits}f}")


def table(runs: Runs, reference: str, share: float) -> str:
    """Return Markdown: what each variant needs to reach a share of `reference`'s best accuracy.

    Standard errors are the jackknife's.
    """
    target = share * max(mean(runs[reference], "accuracy"))
    columns = ("rounds", "drawn_tokens", "trained", "cpu_seconds")
    lines = [
        f"Cost of {share:.0%} of the best mean accuracy of {VARIANTS[reference].name}, "
        f"{target:.3f}, relative to its cost\n",
        "| | best mean accuracy | last, by seed | rounds | tokens drawn | trained completions "
        "| CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, progress in runs.items():
        of = partial(ratio, name=name, reference=reference, share=share)
        cells = [with_jackknife(partial(of, column=column), runs) for column in columns]
        final = " / ".join(f"{p['accuracy'][-1]:.2f}" for p in progress)
        best = max(mean(progress, "accuracy"))
        lines.append(f"| {VARIANTS[name].name} | {best:.3f} | {final} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that are missing and print the tables."""
    parser = results.parser("selection", __doc__)
    parser.add_argument("--task", default="once", choices=TASKS, help="what is learned")
    parser.add_argument("--rounds", type=int, default=40, help="rounds per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(5)], help="of the runs")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS][:6], choices=VARIANTS)
    parser.add_argument("--share", type=float, default=0.99, help="share of the best accuracy")
    parser.add_argument("--workers", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/selection"), help="folder for runs")
    options = results.parse(parser, arguments)
    config, prompts, of_task = TASKS[options.task]
    jobs = [(v, seed) for seed in options.seeds for v in options.variants]

    def run(job: tuple[str, int]) -> Path:
        name, seed = job
        rounds = options.rounds * (3 if name == "few" else 1)
        drawn = f"--data.prompts_per_round={prompts // (2 if name.startswith('half_') else 1)}"
        arguments = (*SETTINGS, *of_task, drawn, *VARIANTS[name].arguments)
        return train(name, arguments, seed, rounds, options.out / options.task, config)

    with ThreadPoolExecutor(options.workers) as pool:
        folders = list(pool.map(run, jobs))
    runs: Runs = {v: [] for v in options.variants}
    for (variant, seed), folder in zip(jobs, folders, strict=True):
        progress = read(folder)
        runs[variant].append(progress)
        end = {name: values[-1] for name, values in progress.items()}
        results.add(f"{variant}, seed {seed}", end)
    for reference in [v for v in ("full", "few", "half_full") if v in runs]:
        print(table(runs, reference, options.share), end="\n\n")


if __name__ == "__main__":
    main()
