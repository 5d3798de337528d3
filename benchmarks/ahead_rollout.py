"""Seconds per round when the next round is drawn during the update, on the quick task.

    python -m benchmarks run ahead_rollout --seeds 0 1 2

Uses vLLM. All seeds start from the same model. The runs of a seed follow one another, and nothing
else should run meanwhile. They have no validation but at the start and the end, as a rollout would
go on during others. Seconds are wall-clock seconds, from the end of the first update to the end of
the last but one: nothing can be drawn beside the first rollout, and beside the last update nothing
is. `seconds in all` has these, too.

- `synchronous`: engine and trainer take turns, each with one thread and with two.
- `verify`, `importance`: `AheadRollout`, with one thread each for the engine's process and the
  trainer.
- `unstreamed`: `verify`, but all gradients are computed after the round.
- `in_flight`: `InFlightUpdates(turns=64)`, whose rounds end when an update's prompts are ready, so
  the bounds of whole rounds are not its own.

Each is at best `bound` times as fast as the faster synchronous run: as if a round took the longer
of rollout and update, each with one thread, with the verification counted as a part of the update.
Two processes slow each other down (memory, caches, clock rate), which this bound leaves out. So two
synchronous runs with one thread each are also run at the same time: `beside` is the bound with
their seconds of rollout and update in place of those of a run alone.

Time to accuracy is the time until the mean reward of five rounds is 0.4 or more.

Cases: the `quick` task as it is; `rollout`, with half the completions trained on, and `update`,
with each round trained on twice.
"""

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks import results
from benchmarks.learning import Variant, logged, train
from benchmarks.rollpacker import OWN_PROCESS
from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.callbacks.rollout_callback import run_of
from lit_rlsched.run.trainer import log_now

AHEAD = "--trainer.callbacks+=AheadRollout"
CASES = {
    "quick": (),
    "rollout": ("--trainer.callbacks+=DownSampling", "--trainer.callbacks.keep=4"),
    "update": ("--data.num_iterations=2",),
}
VARIANTS = {
    "1_thread": Variant("synchronous, 1 thread"),
    "2_threads": Variant("synchronous, 2 threads"),
    "verify": Variant("verify", (*OWN_PROCESS, AHEAD)),
    "unstreamed": Variant(
        "verify, gradients after the round",
        (*OWN_PROCESS, AHEAD, "--trainer.callbacks+=benchmarks.ahead_rollout.Unstreamed"),
    ),
    "importance": Variant(
        "importance", (*OWN_PROCESS, AHEAD, "--trainer.callbacks.correction=importance")
    ),
    "in_flight": Variant(
        "in-flight updates",
        (*OWN_PROCESS, "--trainer.callbacks+=InFlightUpdates", "--trainer.callbacks.turns=64"),
    ),
}
REWARD, ROUNDS = 0.4, 5
"""A run has reached an accuracy when the mean of so many rounds is this."""
BOUNDED = ("verify", "unstreamed", "importance")
"""Variants that draw whole rounds beside the update."""
SETTINGS = (
    "--data.val_greedy=false",
    "--data.val_num_generations=1",
    "--trainer.callbacks+=benchmarks.ahead_rollout.WallClock",
)


class WallClock(RolloutCallback):
    """Log `wall_seconds`: seconds since the first round began, with all that is between rounds."""

    _began: float | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = self._began or time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Read the clock after the last step of a round."""
        assert self._began is not None
        if run_of(trainer, self).round_is_over:
            log_now(trainer, {"wall_seconds": time.perf_counter() - self._began})


class Unstreamed(RolloutCallback):
    """Compute no gradients during the rollout."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo what `AheadRollout` has set."""
        run_of(trainer, self).schedule.streaming = None


@dataclass(frozen=True)
class Run:
    """What a run took, in seconds a round, the first and the last left out, where not stated."""

    reward: float
    """Mean of the last `ROUNDS` rounds."""
    accuracy: float
    whole: float
    """Seconds of the run, with the first and the last round."""
    reached: float
    """Seconds until the accuracy was reached; NaN if it was not."""
    seconds: float
    rollout: float
    """Of the engine: the rounds, and what was drawn ahead of them."""
    drafts: float
    """Verification of drafts."""
    waited: float
    """For rollouts beside the update."""
    kept: float
    """Share of the drafts' tokens that were accepted."""

    @property
    def update(self) -> float:
        """Of a synchronous run: all but the rollouts."""
        return self.seconds - self.rollout


def read(folder: Path) -> Run:
    """Read what a run logged."""
    rounds: list[dict[str, float]] = [{}]
    accuracy = float("nan")
    for row in logged(folder):
        accuracy = float(row.get("val/accuracy") or accuracy)
        rounds[-1] |= {name: float(value) for name, value in row.items() if value}
        if row.get("wall_seconds"):
            rounds.append({})
    rounds.pop()  # what was logged after the last update
    reached = [
        last["wall_seconds"]
        for i, last in enumerate(rounds)
        if i + 1 >= ROUNDS and fmean(r["reward"] for r in rounds[i + 1 - ROUNDS : i + 1]) >= REWARD
    ]
    counted = rounds[1:-1]

    def a_round(name: str) -> float:
        return fmean(r.get(name, 0.0) for r in counted)

    tokens, drafts = a_round("drafts/tokens"), a_round("time/drafts")
    beside = a_round("ahead_rollout/rollout_seconds") if tokens else 0.0
    return Run(
        reward=fmean(r["reward"] for r in rounds[-ROUNDS:]),
        accuracy=accuracy,
        whole=rounds[-1]["wall_seconds"],
        reached=reached[0] if reached else float("nan"),
        seconds=(counted[-1]["wall_seconds"] - rounds[0]["wall_seconds"]) / len(counted),
        rollout=a_round("time/rollout") - drafts + beside,
        drafts=drafts,
        waited=a_round("ahead_rollout/wait_seconds"),
        kept=a_round("drafts/accepted_tokens") / tokens if tokens else 0.0,
    )


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let the runs of this block compute with so many threads."""
    before = dict(os.environ)
    os.environ.update({name: str(number) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def mean(runs: Sequence[Run], name: str) -> float:
    """Mean of a figure over runs."""
    return fmean(getattr(run, name) for run in runs)


def phases(runs: dict[str, list[Run]], beside: Sequence[Run]) -> str:
    """Return Markdown: seconds a round of the synchronous runs, by phase and what else computes."""
    lines = [
        "| | 1 thread | 2 threads | gain of the second | beside another run | slower |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("rollout", "update"):
        one, two, other = (mean(of, name) for of in (runs["1_thread"], runs["2_threads"], beside))
        cells = f"{one:.2f} | {two:.2f} | {one / two:.2f} | {other:.2f} | {other / one:.2f}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def table(runs: dict[str, list[Run]], beside: Sequence[Run]) -> str:
    """Return Markdown: a row for each variant, with means over the seeds."""
    alone = runs["1_thread"]
    plain = min(alone, runs["2_threads"], key=lambda of: mean(of, "seconds"))
    best = mean(plain, "seconds")
    lines = [
        "| | seconds a round, by seed | mean | times as fast, mean and standard error | bound "
        "| beside | rollouts | verification | waited | drafts kept | reward | accuracy "
        "| seconds to accuracy | seconds in all |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in runs.items():
        gains = [a.seconds / b.seconds for a, b in zip(plain, own, strict=True)]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        drafts = mean(own, "drafts")
        bounds = [
            best / max(mean(of, "rollout"), mean(of, "update") + drafts) for of in (alone, beside)
        ]
        cells: list[Any] = [
            " / ".join(f"{run.seconds:.2f}" for run in own),
            f"{mean(own, 'seconds'):.2f}",
            f"{fmean(gains):.2f} ± {error:.2f}",
            *(f"{bound:.2f} ({fmean(gains) / bound:.0%})" for bound in bounds if name in BOUNDED),
            *("" for _ in bounds if name not in BOUNDED),
            f"{mean(own, 'rollout'):.2f}",
            f"{drafts:.2f}",
            f"{mean(own, 'waited'):.2f}",
            f"{mean(own, 'kept'):.2f}",
            f"{mean(own, 'reward'):.3f}",
            f"{mean(own, 'accuracy'):.2f}",
            " / ".join(f"{run.reached:.0f}" for run in own),
            " / ".join(f"{run.whole:.0f}" for run in own),
        ]
        lines.append(f"| {VARIANTS[name].name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measured(case: str, options: Namespace) -> str:
    """Train the runs of a case that are missing, and return its tables."""
    last = f"--trainer.check_val_every_n_epoch={options.rounds}"
    shared = (*SETTINGS, last, *CASES[case])

    def fit(name: str, seed: int = 0, arguments: Sequence[str] = ()) -> Run:
        settings = (*shared, *arguments)
        folder = train(f"{case}_{name}", settings, seed, options.rounds, options.out, warm=False)
        results.add(f"{case}, {name}, seed {seed}", vars(run := read(folder)))
        return run

    runs: dict[str, list[Run]] = {}
    for seed in options.seeds:
        for name, variant in VARIANTS.items():
            with threads(2 if name == "2_threads" else 1):
                runs.setdefault(name, []).append(fit(name, seed, variant.arguments))
    for folder in (options.out / results.commit()).glob(f"{case}_beside_*"):
        shutil.rmtree(folder)  # one of them alone would not be beside another
    with threads(1), ThreadPoolExecutor(2) as pool:
        beside = [*pool.map(fit, ("beside_1", "beside_2"))]
    return f"{phases(runs, beside)}\n\n{table(runs, beside)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that are missing and print tables for each case."""
    parser = results.parser("ahead_rollout", __doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    results.add_cases(parser, CASES)
    parser.add_argument("--out", type=Path, default=Path("runs/ahead_rollout"), help="runs' folder")
    options = results.parse(parser, arguments)
    if options.rounds < 3:
        parser.error(
            f"--rounds={options.rounds}: use 3 or more, as the first and last do not count"
        )
    for case in options.cases:
        print(f"\n{case}\n\n{measured(case, options)}", flush=True)


if __name__ == "__main__":
    main()
