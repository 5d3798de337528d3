"""Policies as tables, small enough to sum over all that they may draw."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from lit_rlsched.training.block_verification import acceptance, excess, prefix_weights

EOS = 0
Tokens = tuple[int, ...]
Table = Mapping[Tokens, Tensor]
"""Log-probs `[V]` of the next token after each sequence that goes on."""
Law = Mapping[Tokens, float]
"""Probability of each sequence."""
T = TypeVar("T")


def prefixes(vocab: int, limit: int) -> list[Tokens]:
    """Return the sequences that go on."""
    return [p for n in range(limit) for p in itertools.product(range(1, vocab), repeat=n)]


def random_policy(vocab: int, limit: int, seed: int, spread: float) -> Table:
    """Draw the logits of a policy from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    rows = prefixes(vocab, limit)
    logits = spread * torch.randn(len(rows), vocab, generator=generator, dtype=torch.float64)
    return dict(zip(rows, logits.log_softmax(-1), strict=True))


def moved(policy: Table, seed: int, spread: float) -> Table:
    """Add normal noise to the logits."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for prefix, row in policy.items():
        noise = torch.randn(len(row), generator=generator, dtype=torch.float64)
        found[prefix] = (row + spread * noise).log_softmax(-1)
    return found


def ends(tokens: Tokens, limit: int) -> bool:
    """Whether a sequence is whole: to its EOS, or to the limit."""
    return len(tokens) == limit or tokens[-1:] == (EOS,)


def completed(logp: Table, begun: Law, limit: int, steps: int | None = None) -> dict[Tokens, float]:
    """Let sequences go on to their end, or for some steps."""
    for _ in range(limit if steps is None else steps):
        out: dict[Tokens, float] = defaultdict(float)
        for prefix, probability in begun.items():
            if ends(prefix, limit):
                out[prefix] += probability
                continue
            for token, of_token in enumerate(logp[prefix].exp().tolist()):
                out[(*prefix, token)] += probability * of_token
        begun = out
    return dict(begun)


def sequences(logp: Table, limit: int) -> dict[Tokens, float]:
    """Return the law of whole sequences."""
    return completed(logp, {(): 1.0}, limit)


def after(logs: Table, draft: Tokens) -> tuple[Tensor, Tensor]:
    """Log-probs of the next token after each prefix but the whole, and of the draft's tokens."""
    rows = torch.stack([logs[draft[:k]] for k in range(len(draft))])
    return rows, rows[range(len(draft)), draft]


def acceptances(log_weights: Tensor, more: Tensor) -> Tensor:
    """Return the probability of accepting each prefix, `[C + 1]`, the empty and the whole one too.

    From `log_weights` `[C + 1]` and `more` `[C]`, the sum of `excess` after each but the whole.
    """
    return torch.cat([acceptance(log_weights[:-1], more), log_weights[-1:].exp()])


def verified(
    logp: Table, draft: Tokens, probability: float, logq: Table, engine: Table | None = None
) -> dict[Tokens, float]:
    """Return all that may become of a draft, each with its probability.

    Args:
        logp: The policy that verifies.
        draft: Tokens drawn by another policy.
        probability: Of the draft.
        logq: That policy, as the trainer computes it.
        engine: The same as the engine computes it, by default without a difference.
    """
    if not draft:
        return {(): probability}
    (ps, p), (qs, _) = after(logp, draft), after(logq, draft)
    log_weights = prefix_weights(p, after(engine or logq, draft)[1])
    excesses = excess(log_weights[:-1], ps, qs)
    accepts = acceptances(log_weights, excesses.sum(-1)).tolist()
    out: dict[Tokens, float] = defaultdict(float)
    left = probability  # of no longer prefix
    for kept in range(len(draft), -1, -1):
        reached, left = left * accepts[kept], left * (1 - accepts[kept])
        if kept == len(draft):
            out[draft] += reached
        elif reached > 0:
            drawn = excesses[kept] if excesses[kept].sum() > 0 else ps[kept].exp()
            for token, of_token in enumerate((drawn / drawn.sum()).tolist()):
                out[(*draft[:kept], token)] += reached * of_token
    return dict(out)


def distance(one: Law, other: Law) -> float:
    """Total variation distance."""
    return sum(abs(one.get(x, 0) - other.get(x, 0)) for x in {*one, *other}) / 2


def mean_distances(drew: Table, other: Table, limit: int) -> Iterator[float]:
    """Yield at each position the mean total variation distance of the next token."""
    begun: dict[Tokens, float] = {(): 1.0}
    for _ in range(limit):
        going = {x: w for x, w in begun.items() if not ends(x, limit)}
        yield sum(
            w * float((drew[x].exp() - other[x].exp()).abs().sum()) / 2 for x, w in going.items()
        )
        begun = completed(drew, begun, limit, 1)
