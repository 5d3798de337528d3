"""Bias of the gradient under a schedule, estimated on the quick task's model at frozen weights.

    python -m benchmarks run gradient_bias
    python -m benchmarks run gradient_bias --rounds 40

`benchmarks run bias` is exact, on a task of three tokens. Here the policy has 0.45 M parameters and
draws with vLLM. Its weights, those of a run after `--rounds`, never change: each update's gradient
is added up and then dropped, so pools are in a steady state and only selection is seen. A replicate
is a run with a seed of its own, over whole pools (of 4 updates; with `TailBatching` whole cycles),
each update weighted by its completions. Advantages are unscaled (`scale_rewards="none"`, groups of
8), the loss is `dr_grpo`.

With `d` the difference between a replicate's mean gradient and that of full rounds, products of two
different replicates `d_i . d_j` are unbiased estimates of the squared bias, since their noise is
independent; negative ones are printed as negative biases. The figure is the square root, over the
norm of the mean gradient of full rounds, which is estimated in the same way. Intervals are 95 %, by
the jackknife over replicates. `full rounds again` has other seeds, and must be 0 within its
interval. Replicates are kept in `--out` by commit and not repeated.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results

FULL, AGAIN = "full rounds", "full rounds again"
POOLED, POOL = ("SortedBatching", "TailBatching"), 4
"""Schedules with pools, and the updates of other schedules that count as one."""
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Quantile of Student's distribution by the number of replicates."""


def _callbacks() -> dict[str, Callable[[], list[Any]]]:
    from lit_rlsched.callbacks import DownSampling, SortedBatching, TailBatching

    return {
        FULL: list,
        AGAIN: list,
        "SortedBatching on_policy": lambda: [SortedBatching(mode="on_policy")],
        "SortedBatching verified": lambda: [SortedBatching(mode="verified")],
        "TailBatching": lambda: [TailBatching()],
        "TailBatching completion_ratio": lambda: [TailBatching(1.25, 1.25)],
        "DownSampling max_variance": lambda: [DownSampling(keep=4)],
    }


CASES = (
    FULL,
    AGAIN,
    "SortedBatching on_policy",
    "SortedBatching verified",
    "TailBatching",
    "TailBatching completion_ratio",
    "DownSampling max_variance",
)


def mean_gradient(case: str, model: str, seed: int, pools: int) -> np.ndarray:
    """Return the mean gradient of whole pools."""
    import torch

    from benchmarks.quick_task import fit_quick_task
    from lit_rlsched import GRPOModule
    from lit_rlsched.callbacks import RolloutCallback

    class Gradients(RolloutCallback):
        def __init__(self) -> None:
            self.weight = self.part_weight = 0
            self.pools = 0.0
            self.total: Any = 0.0
            self.part: Any = 0.0

        def on_round_end(self, trainer: Any, pl_module: Any, round: Any) -> None:
            self.completions = sum(not c.dropped for c in round.completions)
            long = round.metrics.get("tail_batching/long_round")
            self.ends = (
                bool(long) if long is not None else not round.metrics["rollout/pool_prompts"]
            )

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            rows = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
            self.part = self.part + self.completions * torch.cat(rows).double()
            self.part_weight += self.completions
            pl_module.zero_grad(set_to_none=True)  # the step then changes nothing
            if self.ends:
                self.total, self.weight = self.total + self.part, self.weight + self.part_weight
                self.part, self.part_weight = 0.0, 0
                self.pools += 1 if case.startswith(POOLED) else 1 / POOL
                trainer.should_stop = self.pools >= pools

    gradients = Gradients()
    fit_quick_task(
        GRPOModule(model, loss_type="dr_grpo", scale_rewards="none"),
        [*_callbacks()[case](), gradients],
        seed,
        100 * pools,
    )
    return np.asarray(gradients.total / gradients.weight, dtype=np.float32)


def train(model: str, rounds: int, folder: str) -> None:
    """Train the quick task and save the policy."""
    from transformers import AutoTokenizer

    from benchmarks.quick_task import fit_quick_task
    from lit_rlsched import GRPOModule

    module = GRPOModule(model, learning_rate=3e-4, betas=(0.9, 0.95), warmup_steps=5)
    fit_quick_task(module, [], 0, rounds)
    policy: Any = module.model
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def cross(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean product of different rows: an unbiased estimate of `E one . E other`."""
    products = one @ other.T
    n = len(products)
    return float((products.sum() - np.trace(products)) / (n * (n - 1)))


def jackknife(estimate: Callable[[np.ndarray], float], n: int) -> tuple[float, float]:
    """Return an estimate over `n` replicates, and half of its 95 % interval."""
    every = np.arange(n)
    without = np.array([estimate(np.delete(every, i)) for i in range(n)])
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    return estimate(every), T_95.get(n, 2.3) * error


def biases(found: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Return squared bias over squared norm, and cosine, with half intervals.

    Args:
        found: Mean gradients of the schedule, `[replicates, parameters]`.
        full: Those of full rounds.
    """
    n = len(found)
    differences = found - full

    def squared(at: np.ndarray) -> float:
        return cross(differences[at], differences[at]) / cross(full[at], full[at])

    def cosine(at: np.ndarray) -> float:
        ours, theirs = cross(found[at], found[at]), cross(full[at], full[at])
        if min(ours, theirs) <= 0:  # the noise is larger than the gradient
            return math.nan
        return cross(found[at], full[at]) / math.sqrt(ours * theirs)

    value, error = jackknife(squared, n)
    angle, off = jackknife(cosine, n)
    return {"squared bias": value, "+-": error, "cosine": angle, "cosine +-": off}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each schedule."""
    parser = results.parser("gradient_bias", __doc__)
    parser.add_argument("--model", default="examples/countdown/model", help="folder of the model")
    parser.add_argument("--rounds", type=int, default=0, help="rounds that it is trained before")
    parser.add_argument("--replicates", type=int, default=4, help="3 or more")
    parser.add_argument("--pools", type=int, default=2, help="of a replicate")
    parser.add_argument("--out", type=Path, default=Path("runs/gradient_bias"), help="folder")
    results.add_cases(parser, CASES)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = results.parse(parser, arguments)
    if options.one:
        case, seed, file = options.one
        np.save(file, mean_gradient(case, options.model, int(seed), options.pools))
        return
    if options.train:
        return train(options.model, options.rounds, options.train)
    folder = options.out / results.commit() / f"{options.rounds}_{options.pools}"
    folder.mkdir(parents=True, exist_ok=True)

    def run(model: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "benchmarks.gradient_bias", "--model", model]
        with (folder / "log").open("a") as log:
            subprocess.run(
                [*command, *map(str, arguments)], check=True, stdout=log, stderr=subprocess.STDOUT
            )

    model = options.model
    if options.rounds:
        model = str(folder / "model")
        if not Path(model, "config.json").exists():
            run(options.model, "--rounds", options.rounds, "--train", model)
    cases = list(dict.fromkeys([FULL, *options.cases]))
    found: dict[str, list[np.ndarray]] = {case: [] for case in cases}
    for seed in range(options.replicates):  # all schedules, so that a stopped run has a table
        for case in cases:
            number = CASES.index(case) + len(CASES) * seed
            file = folder / f"{number}.npy"
            if not file.exists():
                run(model, "--pools", options.pools, "--one", case, number, file)
            found[case].append(np.load(file).astype(np.float64))
    print("| | bias | 95 % of its square | cosine |\n|---|---|---|---|")
    full = np.stack(found[FULL])
    for case in cases[1:]:
        figures = biases(np.stack(found[case]), full)
        results.add(case, figures)
        square, error = figures["squared bias"], figures["+-"]
        bias = math.copysign(math.sqrt(abs(square)), square)
        print(
            f"| {case} | {bias:.2f} | {square - error:.3f} to {square + error:.3f} | "
            f"{figures['cosine']:.3f} +- {figures['cosine +-']:.3f} |"
        )


if __name__ == "__main__":
    main()
