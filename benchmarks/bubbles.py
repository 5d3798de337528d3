"""Idle slots and wasted tokens of SortedRL and of plain rounds, on the shape of SortedRL's paper.

    python -m benchmarks run bubbles

Deterministic: pools of random lengths run through the controller, round rule and admission of a
real run, on the simulated engine. A completion has the same length whenever it is drawn, as in the
paper's comparison (arXiv 2603.23414, 512 prompts in 4 batches, at most 8k tokens). `turns` is the
admission order `least_attained`; the other rows admit completions in the order of their prompts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median_low
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.audit import PoolAudit
from lit_rlsched.rollout.round_runner import DrawnRound
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.simulation.loop import (
    Mode,
    PoolOrder,
    Visit,
    recommend_slots,
    simulated_rounds,
    simulated_session,
)
from lit_rlsched.types import Prompt, Sampling

PROMPTS, UPDATE, LIMIT = 512, 128, 8192
"""Prompts per pool, prompts per update, and maximum number of tokens per completion."""
TARGETS = (0.05, 0.03)
RECOMMENDED = ["target", "", "slots, by pool", "median", "bubble ratio", "steps", "the bound"]
HEADER = [
    "slots",
    "",
    "bubble ratio",
    "in the last round",
    "its share of steps",
    "useful tokens",
    "pauses",
    "recomputed after pauses",
    "after updates",
    "stale tokens",
    "steps",
    "tokens/s",
]


def simulated_pool(
    lengths: Sequence[Sequence[int]],
    rule: RoundRule,
    slots: int,
    order: PoolOrder,
    limit: int,
    **costs: Any,
) -> Iterator[DrawnRound]:
    """Draw rounds until every prompt of a pool is trained on.

    Args:
        lengths: Lengths of the completions of each prompt, the same number for each.
        rule: Rule of the rounds.
        slots: Number of slots.
        order: Admission order.
        limit: Maximum number of tokens per completion.
        costs: Costs of the engine's steps, as in `SimulatedEngine`.
    """
    recorded = {f"{p}/{c}": n for p, group in enumerate(lengths) for c, n in enumerate(group)}
    engine = SimulatedEngine(lengths=recorded, length_only=True, stream=False, **costs)
    session = simulated_session(engine, slots, limit + 1, lambda: Admission(slots, order=order))
    visits = (Visit(Prompt(str(p), "", (1,)), str(p)) for p in range(len(lengths)))
    return simulated_rounds(session, visits, Sampling(limit), len(lengths[0]), lambda number: rule)


@dataclass
class Drained:
    """Figures of a pool, from its first round until it is empty."""

    rounds: list[RolloutTrace]
    metrics: dict[str, float]
    """The metrics `pool/*`; the bubble ratio uses the engine's clock."""
    resumed: int
    """Tokens from earlier rounds, counted in each round that resumed a completion after them. Their
    cache has to be computed again for the new policy.
    """
    stale: int
    """Tokens that were drawn by an earlier policy than the one that trained on them."""

    @property
    def decode_steps(self) -> int:
        """Decode steps of all rounds."""
        return sum(t.decode_steps for t in self.rounds)

    @property
    def seconds(self) -> float:
        """Duration of all rounds, by the engine's clock."""
        return sum(t.seconds for t in self.rounds)

    @property
    def tokens(self) -> int:
        """Decoded tokens, whether trained on or not."""
        return sum(t.tokens for t in self.rounds)

    @property
    def pauses(self) -> int:
        """Number of times a completion was paused."""
        return sum(t.pauses for t in self.rounds)

    @property
    def recomputed(self) -> int:
        """Tokens computed again after pauses, if the engine does not cache them meanwhile."""
        prompts = sum(len(t.spans["request"]) for t in self.rounds)  # prompts of one token each
        return sum(t.total("prefill_tokens") for t in self.rounds) - prompts - self.resumed

    @property
    def useful(self) -> float:
        """Decoded tokens that were trained on."""
        return self.metrics["pool/useful_token_share"] * self.tokens


def draw_lengths(seed: int, median: float, sigma: float) -> list[int]:
    """Return log-normal completion lengths of a pool, cut at the limit."""
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, PROMPTS)
    return np.ceil(lengths).clip(max=LIMIT).astype(int).tolist()


def decode(
    lengths: Sequence[Sequence[int]],
    rule: RoundRule,
    slots: int,
    order: PoolOrder = "fifo",
    limit: int = LIMIT,
    **costs: Any,
) -> Drained:
    """Draw a pool until all its prompts are trained on; the arguments are `simulated_pool`'s."""
    audit = PoolAudit()
    traces: list[RolloutTrace] = []
    resumed = stale = 0
    for version, drawn in enumerate(simulated_pool(lengths, rule, slots, order, limit, **costs)):
        traces.append(drawn.trace)
        audit.add(drawn.harvest, drawn.trace)
        resumed += sum(drawn.begun[ran] for ran in set(drawn.trace.spans["request"]))
        trained = [c for group in drawn.harvest.trained for c in group.completions]
        spans = [segment for c in trained for segment in c.segments]
        stale += sum(tokens for author, tokens in spans if author != version)
    return Drained(traces, audit.metrics(), resumed, stale)


def bubble_ratio(rounds: Iterable[RolloutTrace]) -> float:
    """Return the bubble ratio of several rounds together, in decode steps."""
    traces = list(rounds)
    slot_steps = sum(t.slot_steps for t in traces)
    return (slot_steps - sum(t.busy_slot_steps for t in traces)) / slot_steps


class Method(NamedTuple):
    """A way to draw a pool."""

    name: str
    mode: Mode | None = None
    """Mode of `SortedRound`; None for rounds that decode all their prompts to the end."""
    order: PoolOrder = "fifo"

    @property
    def rule(self) -> RoundRule:
        """The rule of its rounds."""
        if self.mode is None:
            return FullRound(UPDATE)
        return SortedRound(UPDATE, PROMPTS, 1, "completion", self.mode)

    def draw(self, pools: Sequence[Sequence[int]], slots: int) -> list[Drained]:
        """Draw each pool until it is empty."""
        return [decode([[n] for n in pool], self.rule, slots, self.order, LIMIT) for pool in pools]


METHODS = (
    Method("synchronous"),
    Method("synchronous, turns", None, "least_attained"),
    Method("on-policy", "on_policy"),
    Method("on-policy, turns", "on_policy", "least_attained"),
    Method("partial", "partial"),
    Method("partial, turns", "partial", "least_attained"),
)


def recommendation(method: Method, target: float, pools: Sequence[Sequence[int]]) -> str:
    """Return the recommended slots of each pool, and the result of their median, as Markdown."""
    assert method.mode is not None
    slots = [
        recommend_slots(pool, UPDATE, target, method.mode, method.order, LIMIT) for pool in pools
    ]
    sure = [int(1 + target / (1 - target) * sum(pool) / max(pool)) for pool in pools]
    drawn = method.draw(pools, median_low(slots))
    ratio = bubble_ratio(trace for pool in drawn for trace in pool.rounds)
    figures = {"slots": median_low(slots), "bubble_ratio": ratio}
    results.add(f"{method.name}, recommended for {target}", figures)
    cells = [
        f"{target:.0%}",
        method.name,
        ", ".join(map(str, slots)),
        str(median_low(slots)),
        f"{ratio:.2%}",
        f"{fmean(pool.decode_steps for pool in drawn):,.0f}",
        f"{min(sure)} to {max(sure)}",
    ]
    return f"| {' | '.join(cells)} |"


def row(name: str, slots: int, pools: Sequence[Drained], plain: Sequence[Drained]) -> str:
    """Return the figures over all pools, and the speed relative to `plain`, as a Markdown row."""
    last = [pool.rounds[-1] for pool in pools]
    steps = sum(pool.decode_steps for pool in pools)
    tokens, useful = sum(pool.tokens for pool in pools), sum(pool.useful for pool in pools)
    figures = {
        "bubble ratio": (bubble_ratio(trace for pool in pools for trace in pool.rounds), ".2%"),
        "in the last round": (bubble_ratio(last), ".1%"),
        "its share of steps": (sum(trace.decode_steps for trace in last) / steps, ".0%"),
        "useful tokens": (useful / tokens, ".1%"),
        "pauses": (fmean(pool.pauses for pool in pools), ",.0f"),
        "recomputed after pauses": (sum(pool.recomputed for pool in pools) / tokens, ".0%"),
        "after updates": (sum(pool.resumed for pool in pools) / tokens, ".0%"),
        "stale tokens": (sum(pool.stale for pool in pools) / useful, ".0%"),
        "steps": (steps / len(pools), ",.0f"),
        "tokens/s": (sum(p.seconds for p in plain) / sum(p.seconds for p in pools) - 1, "+.1%"),
    }
    results.add(f"{name}, {slots} slots", {title: value for title, (value, _) in figures.items()})
    cells = [str(slots), name, *(f"{value:{form}}" for value, form in figures.values())]
    return f"| {' | '.join(cells)} |"


def _print_header(names: Sequence[str]) -> None:
    print("", f"| {' | '.join(names)} |", "|---" * len(names) + "|", sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("bubbles", __doc__)
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[16, 32, 64, 128], help="numbers of slots"
    )
    parser.add_argument("--pools", type=int, default=8, help="number of pools")
    parser.add_argument(
        "--median", type=float, default=1200, help="median of the log-normal lengths, in tokens"
    )
    parser.add_argument(
        "--sigma",
        type=float,
        default=1.1,
        help="standard deviation of the logarithm of the lengths",
    )
    options = results.parse(parser, arguments)
    pools = [draw_lengths(seed, options.median, options.sigma) for seed in range(options.pools)]
    lengths = np.concatenate(pools)
    print(
        f"{options.pools} pools of {PROMPTS} completions; mean {lengths.mean():.0f} tokens, "
        f"{(lengths <= 3000).mean():.1%} within 3,000, {(lengths == LIMIT).mean():.1%} at {LIMIT:,}"
    )
    _print_header(RECOMMENDED)
    for target, method in product(TARGETS, METHODS):
        if method.mode is not None:
            print(recommendation(method, target, pools), flush=True)
    _print_header(HEADER)
    for slots in options.slots:
        plain: list[Drained] = []
        for method in METHODS:
            drawn = method.draw(pools, slots)
            plain = plain or drawn
            print(row(method.name, slots, drawn, plain), flush=True)


if __name__ == "__main__":
    main()
