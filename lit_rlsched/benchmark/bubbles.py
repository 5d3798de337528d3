"""Idle slots and wasted tokens of SortedRL against plain rounds, on the paper's shape.

    python -m lit_rlsched.benchmark.bubbles

Deterministic: pools of drawn lengths go through the controller, the round policy and the admission
of a run, on the simulated engine. A completion is as long whenever it is drawn, as in the paper's
own comparison (arXiv 2603.23414, 512 prompts in 4 batches, at most 8k tokens).
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from statistics import fmean, median_low
from typing import Any

import numpy as np

from lit_rlsched.benchmark.replay import Unscored
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.audit import PoolAudit, restart_stale, settle
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Completion, Group, Prompt, Sampling
from lit_rlsched.rollout.worker import RolloutWorker
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.planning import recommend_slots
from lit_rlsched.scheduling.rounds import FullRound, Mode, RoundPolicy, SortedRound

PROMPTS, UPDATE, LIMIT = 512, 128, 8192
"""Of a pool, of an update; tokens of a completion."""
TARGETS = (0.05, 0.03)
MODES: tuple[Mode, ...] = ("on_policy", "partial")
METHODS: dict[str, Callable[[], RoundPolicy]] = {
    "synchronous": lambda: FullRound(UPDATE),
    "on-policy": lambda: SortedRound(UPDATE, PROMPTS, 1, "completion", "on_policy"),
    "partial": lambda: SortedRound(UPDATE, PROMPTS, 1, "completion", "partial"),
}


@dataclass
class Drained:
    """What a pool needed."""

    rounds: list[RolloutTrace]
    metrics: dict[str, float]
    """`pool/*`, the bubble ratio by the engine's clock."""

    @property
    def decode_steps(self) -> int:
        """Of all rounds."""
        return sum(t.decode_steps for t in self.rounds)

    @property
    def seconds(self) -> float:
        """Of all rounds, by the engine's clock."""
        return sum(t.seconds for t in self.rounds)

    @property
    def tokens(self) -> int:
        """Decoded, whatever became of them."""
        return sum(t.tokens for t in self.rounds)

    @property
    def useful(self) -> float:
        """Tokens that were trained on."""
        return self.metrics["pool/useful_token_share"] * self.tokens


def draw_lengths(seed: int, median: float, sigma: float) -> list[int]:
    """A pool's completion lengths: log-normal, cut at the limit."""
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, PROMPTS)
    return np.ceil(lengths).clip(max=LIMIT).astype(int).tolist()


def decode(
    lengths: Sequence[Sequence[int]], policy: RoundPolicy, slots: int, **costs: Any
) -> Drained:
    """Draw prompts until all are trained on.

    Args:
        lengths: Of each prompt's completions.
        policy: When rounds end, and how many prompts it takes at a time.
        slots: Most completions that decode at once.
        costs: Of the engine's step, see `SimulatedEngine`; its own defaults without them.
    """
    limit = max(map(max, lengths))
    recorded = {f"{p}/{c}": n for p, group in enumerate(lengths) for c, n in enumerate(group)}
    engine = SimulatedEngine(lengths=recorded, stream=False, **costs)
    engine.start(EngineSpec("", slots=slots, max_model_len=limit + 1, eos_token_ids=(0,)))
    worker = RolloutWorker(engine, Admission(slots))
    controller = RolloutController(worker, Unscored(), seed=0)  # type: ignore[arg-type]
    source = (
        Group(
            str(p),
            Prompt(str(p), "", (1,)),
            Sampling(limit),
            [Completion(c) for c in range(len(group))],
        )
        for p, group in enumerate(lengths)
    )
    pool, audit = RolloutBuffer(), PoolAudit()
    traces: list[RolloutTrace] = []
    while True:
        for group in islice(source, policy.fresh_prompts(len(pool))):
            pool.add(group)
        if not len(pool):
            return Drained(traces, audit.metrics())
        version = len(traces)
        plan = policy.plan(list(pool))
        stale = restart_stale(plan, version, policy)
        traces.append(worker.start_trace())
        for _ in controller.run(plan, policy, version):
            pass
        harvest = settle(plan, policy, stale)
        pool.settle(plan, harvest.left)
        audit.add(harvest, worker.trace)


def bubble_ratio(rounds: Iterable[RolloutTrace]) -> float:
    """Of several rounds together, with a decode step as the unit of time."""
    traces = list(rounds)
    slot_steps = sum(t.slot_steps for t in traces)
    return (slot_steps - sum(t.busy_slot_steps for t in traces)) / slot_steps


def recommendations(pools: Sequence[Sequence[int]]) -> tuple[str, list[int]]:
    """The planner's slots for each pool, as Markdown; and the median of each row, once."""
    lines = [
        "| target | mode | slots, by pool | median | sure for any order of the pool |",
        "|---|---|---|---|---|",
    ]
    medians = set()
    for mode, target in product(MODES, TARGETS):
        slots = [recommend_slots(lengths, UPDATE, target, mode) for lengths in pools]
        sure = [int(1 + target / (1 - target) * sum(p) / max(p)) for p in pools]
        medians.add(median_low(slots))
        lines.append(
            f"| {target:.0%} | {mode} | {', '.join(map(str, slots))} | {median_low(slots)} | "
            f"{min(sure)} to {max(sure)} |"
        )
    return "\n".join(lines), sorted(medians)


def row(name: str, slots: int, pools: Sequence[Drained], plain: Sequence[Drained]) -> str:
    """A method at a number of slots over all pools, and its speed over `plain`'s, as Markdown."""
    ratios = [bubble_ratio(pool.rounds) for pool in pools]
    rounds = [trace for pool in pools for trace in pool.rounds]
    last = [pool.rounds[-1] for pool in pools]
    before = [trace for pool in pools for trace in pool.rounds[:-1]]
    steps = sum(pool.decode_steps for pool in pools)
    useful = sum(pool.useful for pool in pools) / sum(pool.tokens for pool in pools)
    cells = [
        str(slots),
        name,
        f"{bubble_ratio(rounds):.2%}",
        f"{min(ratios):.1%} to {max(ratios):.1%}",
        f"{bubble_ratio(before):.2%}",
        f"{bubble_ratio(last):.1%}",
        f"{sum(trace.decode_steps for trace in last) / steps:.0%}",
        f"{useful:.1%}",
        f"{fmean(pool.metrics['pool/trained_over_drawn_length'] for pool in pools):.2f}",
        f"{steps / len(pools):,.0f}",
        f"{sum(pool.decode_steps for pool in plain) / steps - 1:+.1%}",
        f"{sum(p.seconds for p in plain) / sum(p.seconds for p in pools) - 1:+.1%}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = [
    "slots",
    "",
    "bubble ratio",
    "by pool",
    "before the last round",
    "in the last round",
    "its share of steps",
    "useful tokens",
    "trained / drawn length",
    "steps of a pool",
    "tokens/s, constant step",
    "tokens/s, cost model",
]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        "python -m lit_rlsched.benchmark.bubbles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--pools", type=int, default=8)
    parser.add_argument("--median", type=float, default=1200, help="of the log-normal lengths")
    parser.add_argument("--sigma", type=float, default=1.1, help="of their logarithm")
    options = parser.parse_args()
    pools = [draw_lengths(seed, options.median, options.sigma) for seed in range(options.pools)]
    lengths = np.concatenate(pools)
    print(
        f"{options.pools} pools of {PROMPTS} completions; mean {lengths.mean():.0f} tokens, "
        f"{(lengths <= 3000).mean():.1%} within 3,000, {(lengths == LIMIT).mean():.1%} at {LIMIT:,}"
    )
    text, recommended = recommendations(pools)
    print(
        "", text, "", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|", sep="\n", flush=True
    )
    for slots in sorted({*recommended, *options.slots}):
        plain: list[Drained] = []
        for name, policy in METHODS.items():
            drained = [decode([[n] for n in pool], policy(), slots) for pool in pools]
            plain = plain or drained
            print(row(name, slots, drained, plain), flush=True)


if __name__ == "__main__":
    main()
