"""Share of a draft that a later policy keeps, by its length and the distance of the policies.

    python -m benchmarks run kept --rounds 24 --seeds 0 1

Trains the quick task (real vLLM) and keeps all completions with the log-probs that the engine
recorded. After each round the trainer computes their log-probs under the policies 1, 2, 4 and 8
rounds later. By block verification a prefix is kept with probability `w` (`prefix_weights`), so the
share that is kept of a draft is the mean of `w` over its prefixes, without drawing anything.

`predicted` is the share for a walk of independent normal log ratios, which depends on one number:
`A = sqrt(2 pi) * distance * sqrt(tokens)`, where the distance is `drafts/distance`, the mean total
variation distance of the next token. `by squares`: with the root mean square of the log ratios in
place of `sqrt(2 pi) * distance`; few tokens change much more than the others.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import torch

from benchmarks import results
from lit_rlsched.training.block_verification import prefix_weights

AGES = (1, 2, 4, 8)
EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
NORMAL = NormalDist()


def kept_share(spread: float) -> float:
    """Return the mean kept share of a draft, for a given `A`.

    The log ratios of its tokens are normal with variance `s**2` and mean `-s**2 / 2`; `A` is `s`
    times the square root of the number of tokens. A prefix is kept with probability
    `E[exp(-M)] = (2 + a**2 / 2) Phi(-a / 2) - a phi(a / 2)`, where `M` is the maximum of the walk
    and `a` belongs to the prefix.
    """

    def prefix(a: float) -> float:
        return (2 + a * a / 2) * NORMAL.cdf(-a / 2) - a * NORMAL.pdf(a / 2)

    steps = 200  # each prefix of the draft counts the same
    return fmean(prefix(spread * math.sqrt((i + 0.5) / steps)) for i in range(steps))


class Draft(NamedTuple):
    """A draft under a later policy."""

    seed: int
    round: int
    """Of the policy that drew it."""
    age: int
    tokens: int
    kept: float
    """Expected number of tokens."""
    distance: float
    """Sum over its tokens of `max(0, 1 - p / q)`."""
    square: float
    """Sum over its tokens of the squared log ratio."""


def drafts(model: str, seed: int, rounds: int) -> list[Draft]:
    """Train, and return each draft under later policies."""
    from benchmarks.quick_task import fit_quick_task
    from lit_rlsched import GRPOModule
    from lit_rlsched.callbacks import RolloutCallback
    from lit_rlsched.training.weight_sync import PolicyReader
    from lit_rlsched.types import Sample

    found: list[Draft] = []

    class Later(RolloutCallback):
        def __init__(self) -> None:
            self.rounds: dict[int, list[Sample]] = {}

        def on_round_end(self, trainer: Any, pl_module: Any, round: Any) -> None:
            reader = PolicyReader(pl_module.model)
            for age in AGES:
                of_age = self.rounds.get(round.number - age, [])
                prompts = [s.group.prompt for s in of_age]
                completions = [s.completion for s in of_age]
                rows = reader.logprobs(prompts, completions, 1.0)
                for completion, logp in zip(completions, rows, strict=True):
                    logq = torch.tensor(completion.logprobs, dtype=torch.float64)
                    ratio = logp.double() - logq
                    kept = prefix_weights(logp, logq)[1:].exp().sum()
                    lost = (1 - ratio.clamp(max=0).exp()).sum()
                    sums = float(kept), float(lost), float(ratio.square().sum())
                    found.append(Draft(seed, round.number - age, age, len(logq), *sums))
            self.rounds[round.number] = [
                Sample(s.group, s.completion.copy()) for s in round.samples
            ]
            self.rounds.pop(round.number - max(AGES), None)

    module = GRPOModule(model, learning_rate=3e-4, betas=(0.9, 0.95), warmup_steps=5)
    fit_quick_task(module, [Later()], seed, rounds)
    return found


class Spread(NamedTuple):
    """`A` of a draft, with the mean of its round and age."""

    distance: float
    """By the mean distance, which a run logs."""
    square: float
    """By the root mean square of log ratios."""


def spreads(found: Sequence[Draft]) -> list[Spread]:
    """Return `A` of each draft, in both ways."""
    sums: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for d in found:
        total = sums[d.seed, d.round, d.age]
        for i, value in enumerate((d.tokens, d.distance, d.square)):
            total[i] += value
    rows = []
    for d in found:
        tokens, distance, square = sums[d.seed, d.round, d.age]
        root = math.sqrt(d.tokens)
        by_distance = math.sqrt(2 * math.pi) * distance / tokens * root
        rows.append(Spread(by_distance, math.sqrt(square / tokens) * root))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print kept shares by age and by `A`."""
    parser = results.parser("kept", __doc__)
    parser.add_argument("--model", default="examples/countdown/model", help="folder of the model")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of a run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="seeds of the runs")
    options = results.parse(parser, arguments)
    found = [d for seed in options.seeds for d in drafts(options.model, seed, options.rounds)]
    every = list(zip(found, spreads(found), strict=True))
    names = "distance | kept of all tokens | predicted | by squares | drafts | mean tokens |"
    print(f"| rounds later | {names}\n|{'---|' * 7}")
    for age in AGES:
        _row(f"{age}", [(d, a) for d, a in every if d.age == age])
    print(f"\n| A | {names}\n|{'---|' * 7}")
    for low, high in pairwise(EDGES):
        if of_bin := [(d, a) for d, a in every if low <= a.distance < high]:
            _row(f"{low:g} to {high:g}", of_bin)


def _row(name: str, rows: Sequence[tuple[Draft, Spread]]) -> None:
    tokens = sum(d.tokens for d, _ in rows)
    figures = {
        "distance": sum(d.distance for d, _ in rows) / tokens,
        "kept": sum(d.kept for d, _ in rows) / tokens,
        "predicted": sum(d.tokens * kept_share(a.distance) for d, a in rows) / tokens,
        "predicted by squares": sum(d.tokens * kept_share(a.square) for d, a in rows) / tokens,
        "drafts": len(rows),
        "mean_tokens": tokens / len(rows),
    }
    results.add(name, figures)
    print(
        f"| {name} | {figures['distance']:.4f} | {figures['kept']:.1%} | "
        f"{figures['predicted']:.1%} | {figures['predicted by squares']:.1%} | "
        f"{len(rows):,} | {tokens / len(rows):.0f} |"
    )
