"""Speculative sampling: what one policy drew becomes a draw of another, exactly.

Block verification (Sun et al., arXiv 2403.10444): of a draft of `q`, a prefix is kept, and a token
drawn after it so that the whole is distributed as `p`, whatever `q` is. Judging token by token
(Leviathan et al., arXiv 2211.17192) does that too, but ends a draft at the first token that is
rejected, so that little is left of a thousand tokens. What is judged here is the prefix: a token
that `p` likes less is made up for by others, and what counts is how far the two probabilities of
the sequence drift apart, which grows with the root of its length. No exact rule keeps more.

A prefix of `i` tokens or more is kept with probability `w[i]`, whatever comes after it. So it does
not matter where a draft is cut, even if that depends on what was kept of an earlier one: what loses
race after race, verified each time, is a draw of the last policy.
"""

import torch
from torch import Tensor


def prefix_weights(logp: Tensor, logq: Tensor) -> Tensor:
    """How far `p` covers what `q` drew, for each prefix of a draft.

    `w[i] = min(1, w[i - 1] * p(x[i]) / q(x[i]))`, from `w[0] = 1`.

    Args:
        logp: Log-probability of each token under the policy that verifies, `[C]`.
        logq: Under the policy that drew it, `[C]`.

    Returns:
        `log w`, `[C + 1]` in float64.
    """
    walk = torch.cat([logp.new_zeros(1).double(), (logp.double() - logq.double()).cumsum(0)])
    return walk - walk.cummax(0).values


def excess(log_weights: Tensor, logp: Tensor, logq: Tensor) -> Tensor:
    """What `p` has more of than `q` after prefixes: `max(0, w * p - q)`.

    Args:
        log_weights: Of the prefixes, `[N]`.
        logp: Log-probabilities of the next token under the policy that verifies, `[N, V]`.
        logq: Under the policy that drew the draft, `[N, V]`.

    Returns:
        `[N, V]` in float64; divided by its sum, what is drawn from after the prefix that is kept.
    """
    p = (logp.double() + log_weights.unsqueeze(-1)).exp_()
    return p.sub_(logq.double().exp_()).clamp_(min=0.0)


def acceptance(log_weights: Tensor, more: Tensor) -> Tensor:
    """The probability with which each prefix is accepted; the longest that is, is kept.

    Args:
        log_weights: See `prefix_weights`; `[C + 1]`.
        more: Sum of `excess` after each prefix but the whole, `[C]`.

    Returns:
        Of the prefixes of 1 to `C` tokens, `[C]`.
    """
    w = log_weights[1:].exp()
    lacking = 1 - w[:-1]
    inner = torch.where(lacking > 0, more[1:] / (more[1:] + lacking), 1.0)
    return torch.cat([inner, w[-1:]])


def num_accepted(acceptance: Tensor, noise: Tensor) -> int:
    """How many tokens of a draft are kept.

    Args:
        acceptance: Of its prefixes, `[C]`.
        noise: `[C]`, uniform in [0, 1).
    """
    accepted = (noise < acceptance).nonzero()
    return int(accepted[-1]) + 1 if len(accepted) else 0
