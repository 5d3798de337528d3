"""What a round drew, what it is worth, and what was measured on the way."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_rlsched.advantages import combine_rewards
from lit_rlsched.data.batching import OptimizerStep
from lit_rlsched.rollout.buffer import pack, unpack
from lit_rlsched.rollout.learner import Learner, RoundLogprobs
from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Completion, Group, Prompt, Row

ZERO_ADVANTAGE = 1e-8
"""Below this an advantage is the rounding error of a group without spread."""


@dataclass(slots=True)
class Round:
    """What one turn of rollout gave to train on: groups in the order they were planned.

    A group has all its completions, or those that were ready, where each stands for itself.
    """

    number: int
    """Rounds before this one."""
    version: int
    """Policy version the completions were drawn under: optimizer steps taken until then."""
    groups: list[Group]
    trace: RolloutTrace | None = None
    """Gone after a resume: a checkpoint keeps what is trained on, not how it was drawn."""
    metrics: dict[str, float] = field(default_factory=dict)
    accumulated: list[OptimizerStep] = field(default_factory=list)
    """Parts of its only optimizer step of which the gradient is there already; not after a resume,
    as gradients are not in a checkpoint either."""

    def state_dict(self) -> dict[str, Any]:
        """What is trained on."""
        return {"number": self.number, "version": self.version, "groups": pack(self.groups)}

    @classmethod
    def from_state(cls, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> "Round":
        """What `state_dict` described; `prompt` finds a prompt by its uid."""
        return cls(state["number"], state["version"], unpack(state["groups"], prompt))

    @property
    def width(self) -> int:
        """`G`, completions of a group as far as their places go."""
        return 1 + max(c.index for c in self.completions)

    @property
    def completions(self) -> list[Completion]:
        """All completions, group after group."""
        return [c for g in self.groups for c in g.completions]

    @property
    def rows(self) -> list[Row]:
        """All completions, each with its group."""
        return [Row(g, c) for g in self.groups for c in g.completions]


def reward_matrix(groups: Sequence[Group], weights: Sequence[float]) -> torch.Tensor:
    """Rewards `[P, G]` in float64, a column for each completion's place in its group.

    NaN where no function gave a score, and where the completion is not there.
    """
    nan = float("nan")
    completions = [c for g in groups for c in g.completions]
    scores = [
        [nan if s is None else s for s in c.scores or [None] * len(weights)] for c in completions
    ]
    rewards = combine_rewards(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    )
    matrix = torch.full((len(groups), 1 + max(c.index for c in completions)), nan).double()
    matrix[cells(groups)] = rewards
    return matrix


def cells(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every completion in a matrix `[P, G]`, group after group."""
    at = [(row, c.index) for row, group in enumerate(groups) for c in group.completions]
    rows, columns = torch.tensor(at).T
    return rows, columns


def check_rewards(round: Round, weights: Sequence[float], enough: int) -> None:
    """Stop a run from which nothing can be learned.

    Args:
        round: Drawn and scored.
        weights: Of the reward functions.
        enough: Completions that are too many to have failed by chance.

    Raises:
        RuntimeError: no completion of the round has a reward.
    """
    if len(round.completions) < enough:
        return
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
    everything = OptimizerStep(round.rows, micro_batch_tokens, row_cost=learner.row_cost)
    with forward_context():
        for rows, batch in zip(everything.micro_batches, everything, strict=True):
            for name, values in learner.score(batch).items():
                for row, logprobs in zip(rows, values.tolist(), strict=True):
                    setattr(row.completion, name, logprobs[: len(row.completion.token_ids)])


def set_advantages(round: Round, learner: Learner, weights: Sequence[float]) -> None:
    """Let the learner turn the round's rewards into advantages.

    Nothing is compared with what is dropped.
    """
    logprobs = _logprobs(round) if learner.needs_reference else None
    rewards, places = reward_matrix(round.groups, weights), cells(round.groups)
    dropped = torch.tensor([c.dropped is not None for c in round.completions])
    rewards[places] = rewards[places].masked_fill(dropped, torch.nan)
    values = learner.compute_advantages(rewards, logprobs)[places].tolist()
    for completion, advantage in zip(round.completions, values, strict=True):
        # equal rewards may leave rounding noise, and a row of zero advantage need not be trained on
        completion.advantage = advantage if abs(advantage) > ZERO_ADVANTAGE else 0.0


def _logprobs(round: Round) -> RoundLogprobs:
    longest = max(len(c.token_ids) for c in round.completions)
    old, ref, mask = torch.zeros(3, len(round.groups) * round.width, longest, dtype=torch.float64)
    rows, columns = cells(round.groups)
    places = (rows * round.width + columns).tolist()
    for i, c in zip(places, round.completions, strict=True):
        if c.old_logprobs is not None and c.ref_logprobs is not None:  # else it was dropped
            length = len(c.token_ids)
            old[i, :length] = torch.tensor(c.old_logprobs)
            ref[i, :length] = torch.tensor(c.ref_logprobs)
            mask[i, :length] = 1
    return RoundLogprobs(old, ref, mask)
