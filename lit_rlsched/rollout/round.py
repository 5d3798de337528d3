"""What a round drew, what it is worth, and what was measured on the way."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from lit_rlsched.advantages import combine_rewards
from lit_rlsched.data.batching import OptimizerStep
from lit_rlsched.rollout.learner import Learner, RoundLogprobs
from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Completion, Group, Row

ZERO_ADVANTAGE = 1e-8
"""Below this an advantage is the rounding error of a group without spread."""


@dataclass(slots=True)
class Round:
    """The completed groups of one turn of rollout, in the order they were planned."""

    number: int
    """Rounds before this one."""
    version: int
    """Policy version the completions were drawn under: optimizer steps taken until then."""
    groups: list[Group]
    trace: RolloutTrace | None = None
    """Gone after a resume: a checkpoint keeps what is trained on, not how it was drawn."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def completions(self) -> list[Completion]:
        """All completions, group after group."""
        return [c for g in self.groups for c in g.completions]

    @property
    def rows(self) -> list[Row]:
        """All completions, each with its group."""
        return [Row(g, c) for g in self.groups for c in g.completions]


def reward_matrix(groups: Sequence[Group], weights: Sequence[float]) -> torch.Tensor:
    """Rewards `[P, G]` in float64, NaN where no function gave a score."""
    nan = float("nan")
    scores = [
        [nan if s is None else s for s in c.scores or [None] * len(weights)]
        for g in groups
        for c in g.completions
    ]
    rewards = combine_rewards(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    )
    return rewards.view(len(groups), -1)


def check_rewards(round: Round, weights: Sequence[float]) -> None:
    """Stop a run from which nothing can be learned.

    Raises:
        RuntimeError: no completion of the round has a reward.
    """
    if reward_matrix(round.groups, weights).isnan().all():
        raise RuntimeError(
            f"None of the {len(round.completions)} completions of round {round.number} has a "
            "reward: every reward function failed, or returned None, for each of them. The log "
            "says how the first failed."
        )


@torch.no_grad()
def score_round(
    round: Round,
    learner: Learner,
    micro_batch_tokens: int,
    forward_context: Callable[[], AbstractContextManager],
) -> None:
    """Take the log-probs that must be taken before the weights move."""
    everything = OptimizerStep(round.rows, micro_batch_tokens)
    with forward_context():
        for rows, batch in zip(everything.micro_batches, everything, strict=True):
            for name, values in learner.score(batch).items():
                for row, logprobs in zip(rows, values.tolist(), strict=True):
                    setattr(row.completion, name, logprobs[: len(row.completion.token_ids)])


def set_advantages(round: Round, learner: Learner, weights: Sequence[float]) -> None:
    """Let the learner turn the round's rewards into advantages."""
    logprobs = _logprobs(round.completions) if learner.needs_reference else None
    advantages = learner.compute_advantages(reward_matrix(round.groups, weights), logprobs)
    for completion, advantage in zip(round.completions, advantages.flatten().tolist(), strict=True):
        # equal rewards may leave rounding noise, and a row of zero advantage need not be trained on
        completion.advantage = advantage if abs(advantage) > ZERO_ADVANTAGE else 0.0


def _logprobs(completions: Sequence[Completion]) -> RoundLogprobs:
    width = max(len(c.token_ids) for c in completions)
    old, ref, mask = torch.zeros(3, len(completions), width, dtype=torch.float64)
    for i, c in enumerate(completions):
        if c.old_logprobs is not None and c.ref_logprobs is not None:  # else it was dropped
            length = len(c.token_ids)
            old[i, :length] = torch.tensor(c.old_logprobs)
            ref[i, :length] = torch.tensor(c.ref_logprobs)
            mask[i, :length] = 1
    return RoundLogprobs(old, ref, mask)
