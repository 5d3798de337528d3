"""Block verification of a draft (arXiv 2403.10444): which prefix of it is kept, and what follows.

The method, its cost and its exactness are described in `docs/explanation/rollout_window.md`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_rlsched.engines.sampling import inverse_cdf
from lit_rlsched.types import ENVIRONMENT, Completion, Draft, Sample


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
    """Compute the probabilities of accepting prefixes that are shorter than the draft.

    From `log_weights` `[N]` of prefixes and `more` `[N]`, the sum of `excess` after each. The
    result `[N]` is at most the weight. A whole draft is accepted with its weight. The longest
    accepted prefix is used.
    """
    lacking = 1 - log_weights.exp()
    return torch.where(lacking > 0, more / (more + lacking), 1.0)


def candidates(log_weights: Tensor, noise: Tensor) -> list[int]:
    """Return the prefixes shorter than the draft that may be the longest accepted one.

    A prefix is accepted with its weight at most, so its noise may rule it out before the policy
    that drew it is asked. One of weight 1 is accepted, so none that is shorter is used.
    """
    weights = log_weights[:-1].exp()
    certain = int((weights == 1).nonzero()[-1])  # there is the empty one
    possible = noise[certain:-1] < weights[certain + 1 :]
    return [*(possible.nonzero().flatten().flip(0) + certain + 1).tolist(), certain]


@dataclass(slots=True)
class Trial:
    """A draft of `C` tokens under verification."""

    sample: Sample
    draft: Draft
    noise: Tensor
    """For the prefixes of 1 to `C` tokens, `[C]`."""
    next_noise: float
    """For the token drawn after the accepted prefix."""
    by: list[int] = field(init=False)
    """Author of each token: the policy version that drew it, or `ENVIRONMENT`."""
    logprobs: Tensor = field(init=False)
    """Of its tokens under the verifying policy, `[C]`; 0 of those of the environment."""
    log_weights: Tensor = field(init=False)
    """Of its prefixes, `[C + 1]`."""
    prefixes: list[int] = field(init=False)
    """Candidates that are not decided yet, the longest first."""

    def __post_init__(self) -> None:
        self.by = [version for version, n in self.draft.segments for _ in range(n)]

    @property
    def temperature(self) -> float:
        return self.sample.group.sampling.temperature

    @property
    def tokens(self) -> int:
        return len(self.draft.token_ids)

    @property
    def text(self) -> Sample:
        """The draft as a completion."""
        token_ids = array("i", self.draft.token_ids)
        return Sample(self.sample.group, Completion(self.sample.completion.index, token_ids))

    def is_finite(self) -> bool:
        drawn = torch.tensor(self.draft.logprobs)
        return bool(drawn.isfinite().all() and not self.logprobs.isnan().any())

    def weigh(self) -> None:
        """Compute weights and candidates."""
        drawn = torch.tensor(self.draft.logprobs, dtype=torch.float64)
        self.log_weights = prefix_weights(self.logprobs, drawn)
        prefixes = candidates(self.log_weights, self.noise)
        # a reply follows from what is before it: no other token could
        self.prefixes = [n for n in prefixes if self.by[n] != ENVIRONMENT]

    @property
    def is_accepted(self) -> bool:
        """Whether the whole draft is accepted."""
        return bool(self.noise[-1] < self.log_weights[-1].exp())

    def become(
        self, completion: Completion, version: int, eos_token_ids: Sequence[int] | None
    ) -> None:
        """Make tokens of the draft a policy version's own; they may be a whole completion.

        If it calls tools, and `eos_token_ids` are None, its turns tell whether it is.
        """
        ids = completion.token_ids
        completion.segments = self.draft.kept(len(ids), version)
        if eos_token_ids is None:
            return
        if ids and ids[-1] in eos_token_ids:
            completion.finish_reason = "stop"
        elif len(ids) >= self.sample.group.sampling.max_completion_length:
            completion.finish_reason = "length"

    def accept(self, tokens: int) -> None:
        """Move the first tokens of the draft into the completion."""
        completion = self.sample.completion
        completion.token_ids = array("i", self.draft.token_ids[:tokens])
        completion.logprobs = array("d", self.logprobs[:tokens].tolist())

    def cut(self, prefixes: Sequence[int], more: Tensor, logp: Tensor) -> bool:
        """Accept the longest of some prefixes if one is accepted, and draw a token after it."""
        accepts = acceptance(self.log_weights[prefixes], more.sum(-1).cpu()).tolist()
        noise = [float(self.noise[length - 1]) if length else 0.0 for length in prefixes]
        accepted = (i for i, chance in enumerate(accepts) if noise[i] < chance)
        if (at := next(accepted, None)) is None:
            self.prefixes = self.prefixes[len(prefixes) :]
            assert self.prefixes, "the last candidate is accepted for certain"
            return False
        left = more[at] if more[at].sum() > 0 else logp[at].double().exp()  # differ by rounding
        token = int(inverse_cdf(left, self.next_noise))
        self.accept(prefixes[at])
        self.sample.completion.token_ids.append(token)
        self.sample.completion.logprobs.append(float(logp[at, token]))
        return True
