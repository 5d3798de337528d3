"""Draws tokens with noise that depends only on a request's seed and position."""

import torch
from torch import Tensor

from lit_rlsched.scheduling import noise as counter_noise


def counter_uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """`scheduling.noise.counter_uniform` for tensors; the result is on the device of `seeds`."""
    drawn = counter_noise.counter_uniform(seeds.cpu().numpy(), counters.cpu().numpy())
    return torch.from_numpy(drawn).to(seeds.device)


def draw(
    logits: Tensor,
    noise: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `noise`.

    Args:
        logits: `[B, V]`, in float32 or float64.
        noise: `[B]`, float64 in [0, 1).
        temperature: `[B]`; 0 takes the most likely token and ignores the other settings.
        top_k: `[B]`, 0 for all tokens.
        top_p: `[B]`, 1 for all tokens.
        min_p: `[B]`, 0 for all tokens.

    Returns:
        Tokens and their log-probs in the truncated distribution, both `[B]`.
    """
    greedy = temperature == 0
    logits = logits / temperature.masked_fill(greedy, 1.0).to(logits.dtype).unsqueeze(1)
    truncated = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if truncated.any():
        rows = truncated.nonzero().squeeze(1)
        logits[rows] = _truncate(logits[rows], top_k[rows], top_p[rows], min_p[rows])
    logp = logits.log_softmax(-1)
    tokens = inverse_cdf(logp.exp(), noise)
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # NaN logits give NaN log-probs, not a crash
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logp.gather(1, tokens.unsqueeze(1)).squeeze(1)


def inverse_cdf(weights: Tensor, noise: Tensor | float) -> Tensor:
    """Return the token whose share of the cumulative distribution contains the noise."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1]
    # strictly below the total, so that the token found has a positive probability
    target = torch.minimum(noise * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, target.unsqueeze(-1), right=True).squeeze(-1)


def _truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set tokens dropped by top-k, then top-p, then min-p to -inf, in the order of `generate`."""
    ordered, index = logits.sort(dim=-1, stable=True)  # ascending
    vocab = logits.shape[1]
    kth = torch.where(top_k > 0, vocab - top_k, 0).clamp(min=0).long().unsqueeze(1)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, kth), -torch.inf)
    probs = ordered.softmax(-1, dtype=torch.float64)
    drop = (probs.cumsum(-1) <= 1 - top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop |= probs < min_p.unsqueeze(1) * probs[:, -1:]
    drop[:, -1] = False
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(1, index, ordered)
