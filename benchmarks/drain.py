"""Decode steps of rounds whose free slots begin the next round, on the quick task.

    python -m benchmarks run drain --rounds 12 --seeds 0

Trains the quick task (real vLLM, in this process) under each rule that decides when a round ends,
with and without `DrainFilling`. All figures are counted:

- `completions`: trained on, per decode step and in all;
- `steps`: decode steps of all rounds;
- `idle`: slot-steps without a request over all slot-steps;
- `verified`: tokens that the trainer read in a forward pass, and the share that it kept;
- `discarded`: tokens that were drawn and not trained on, rejected tokens of drafts included.

Beside them CPU seconds: of the whole run from its first round on, per 1,000 completions, and the
part of the verification (in wall-clock seconds). Both runs of a rule and a seed follow one another.

The last round of a run begins no drafts. A decode step with more requests takes longer, on a CPU
most of all, and a verification is a forward pass, so fewer steps need not be less time.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lightning import LightningModule, Trainer

from benchmarks import results
from benchmarks.quick_task import fit_quick_task
from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import DrainFilling, RolloutCallback, SortedBatching, TailBatching
from lit_rlsched.training.round import Round

RULES: dict[str, Callable[[], list[Any]]] = {
    "whole rounds": list,
    "`TailBatching()`": lambda: [TailBatching()],
    "`TailBatching(1.25, max_deferrals=8)`": lambda: [TailBatching(1.25, max_deferrals=8)],
    "`SortedBatching()`": lambda: [SortedBatching()],
    '`SortedBatching(mode="verified")`': lambda: [SortedBatching(mode="verified")],
}
SUMMED = {
    "steps": "rollout/decode_steps",
    "slot_steps": "rollout/slot_steps",
    "idle_slot_steps": "rollout/idle_slot_steps",
    "tokens": "rollout/tokens",
    "prefill": "rollout/prefill_tokens",
    "begun": "rollout/drafts_begun",
    "verified": "drafts/tokens",
    "kept": "drafts/accepted_tokens",
    "discarded": "rollout/discarded_tokens",
    "rollout_seconds": "time/rollout",
    "verification_seconds": "time/drafts",
}


class Totals(RolloutCallback):
    """Sums of the metrics of all rounds."""

    def __init__(self) -> None:
        self.of: defaultdict[str, float] = defaultdict(float)
        self.steps: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.of["cpu_seconds"] = -time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.of["cpu_seconds"] += time.process_time()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Add a round."""
        self.of["completions"] += len(round.completions)
        self.steps.append(int(round.metrics["rollout/decode_steps"]))
        for name, metric in SUMMED.items():
            self.of[name] += round.metrics.get(metric, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all runs and print a row for each."""
    parser = results.parser("drain", __doc__)
    parser.add_argument("--model", default="examples/countdown/model", help="folder of the model")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of a run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="seeds of the runs")
    results.add_cases(parser, RULES)
    options = results.parse(parser, arguments)
    names = "completions | steps | per 1,000 completions | idle | begun | verified | kept |"
    seconds = "CPU seconds per 1,000 completions | verification"
    print(f"| | seed | {names} discarded | {seconds} |\n|{'---|' * 12}")
    for case in options.cases:
        for seed in options.seeds:
            for filled in (False, True):
                totals, on = Totals(), [DrainFilling()] if filled else []
                module = GRPOModule(
                    options.model, learning_rate=3e-4, betas=(0.9, 0.95), warmup_steps=5
                )
                fit_quick_task(module, [totals, *RULES[case](), *on], seed, options.rounds)
                _row(f"{case}{', filled' * filled}", seed, totals)


def _row(name: str, seed: int, totals: Totals) -> None:
    of = totals.of
    results.add(f"{name}, seed {seed}", {name: float(value) for name, value in of.items()})
    kept = f"{of['kept'] / of['verified']:.1%}" if of["verified"] else ""
    print(
        f"| {name} | {seed} | {of['completions']:,.0f} | {of['steps']:,.0f} | "
        f"{1000 * of['steps'] / of['completions']:.0f} | "
        f"{of['idle_slot_steps'] / of['slot_steps']:.1%} | {of['begun']:,.0f} | "
        f"{of['verified']:,.0f} | {kept} | {of['discarded']:,.0f} | "
        f"{1000 * of['cpu_seconds'] / of['completions']:.2f} | {of['verification_seconds']:.1f} | "
        f" <!-- {totals.steps} -->",
        flush=True,
    )


if __name__ == "__main__":
    main()
