"""Block verification (Sun et al., arXiv 2403.10444) of a draft of policy `q` under policy `p`.

The accepted prefix of the draft, and a token drawn after it, are distributed exactly as `p`. Unlike
token-wise speculative sampling (Leviathan et al., arXiv 2211.17192), which ends a draft at the
first rejected token, this judges whole prefixes; no exact rule accepts more.

A prefix of at least `i` tokens is accepted with probability `w[i]`, whatever follows it. The result
is therefore exact for any place at which a draft was cut, and after repeated verification.
"""

import torch
from torch import Tensor


def prefix_weights(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute `log w` of each prefix: `w[i] = min(1, w[i-1] * p(x[i]) / q(x[i]))` from `w[0] = 1`.

    From the log-probabilities `[C]` of the tokens. The result is `[C + 1]` in float64.
    """
    walk = torch.cat([logp.new_zeros(1).double(), (logp.double() - logq.double()).cumsum(0)])
    return walk - walk.cummax(0).values


def excess(log_weights: Tensor, logp: Tensor, logq: Tensor) -> Tensor:
    """Compute `max(0, w * p - q)` of the next token, to draw from after an accepted prefix.

    From `log_weights` `[N]` of prefixes and log-probabilities `[N, V]` of the next token under `p`
    and `q`. The result is `[N, V]` in float64, not normalised.
    """
    p = (logp.double() + log_weights.unsqueeze(-1)).exp_()
    q = logq.to(torch.float64, copy=True).exp_()  # `double` would not copy float64
    return p.sub_(q).clamp_(min=0.0)


def acceptance(log_weights: Tensor, more: Tensor) -> Tensor:
    """Compute the probability of accepting each prefix; the longest accepted one is used.

    From `log_weights` `[C + 1]` and `more` `[C]`, the sum of `excess` after each prefix except the
    whole draft. The result is `[C]`, for the prefixes of 1 to `C` tokens.
    """
    w = log_weights[1:].exp()
    lacking = 1 - w[:-1]
    inner = torch.where(lacking > 0, more[1:] / (more[1:] + lacking), 1.0)
    return torch.cat([inner, w[-1:]])


def num_accepted(acceptance: Tensor, noise: Tensor) -> int:
    """Number of accepted tokens, from `acceptance` `[C]` and uniform `noise` `[C]` in [0, 1)."""
    accepted = (noise < acceptance).nonzero()
    return int(accepted[-1]) + 1 if len(accepted) else 0
