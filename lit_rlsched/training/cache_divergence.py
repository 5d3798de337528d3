"""How far tokens that were drawn with keys and values of older weights are from the policy."""

from typing import TYPE_CHECKING

import torch

from lit_rlsched.training.round import Round

if TYPE_CHECKING:
    from lit_rlsched.training.weight_sync import PolicyReader

MOST = 8
"""Completions of a round that are scored."""


def cache_divergence(round: Round, policy: "PolicyReader", temperature: float) -> dict[str, float]:
    """Estimate the divergence of what the engine drew from the policy of the same version.

    Over the tokens of the newest version in completions that older ones began: the policy has these
    weights now, and only the engine's cache differs.

    Returns:
        `in_flight/cache_kl`, in nats per token (`exp(d) - 1 - d` with `d = p - q`, k3), if there
        are such tokens.
    """
    samples = [
        s
        for s in round.samples
        if len(s.completion.version_spans) > 1 and s.completion.tokens_of(round.version)
    ][:MOST]
    if not samples:
        return {}
    logprobs = policy.logprobs(
        [s.group.prompt for s in samples], [s.completion for s in samples], temperature
    )
    gaps = [
        (ours - torch.tensor(s.completion.logprobs, dtype=ours.dtype))[
            -s.completion.tokens_of(round.version) :
        ]
        for s, ours in zip(samples, logprobs, strict=True)
    ]
    gap = torch.cat(gaps).double()
    return {"in_flight/cache_kl": float((gap.exp() - 1 - gap).mean())}
