"""What a round drew, what it is worth, and what was measured on the way."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_rlsched.data.repetition import places
from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.advantages import combine_rewards
from lit_rlsched.training.learner import Learner, RoundLogprobs
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.types import Completion, Group, Prompt, Sample

ZERO_ADVANTAGE = 1e-8
"""Below this an advantage is the rounding error of a group without spread."""
NONFINITE = "nonfinite_advantage"
"""Why a completion is dropped whose advantage is not finite."""
LARGEST_ADVANTAGE = 1e16
"""Above this it counts as infinite: squares of the gradient, and so its norm, overflow in float32
from 1.8e19 on."""


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
    def samples(self) -> list[Sample]:
        """All completions, each with its group."""
        return [Sample(g, c) for g in self.groups for c in g.completions]


def reward_matrix(groups: Sequence[Group], weights: Sequence[float]) -> torch.Tensor:
    """Rewards `[P, G]` in float64, a column for each completion's place in its group.

    NaN where no function gave a score, where the weighted sum is infinite, and where the completion
    is not there.
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
    matrix[cells(groups)] = rewards.masked_fill(rewards.isinf(), nan)
    return matrix


def cells(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every completion in a matrix `[P, G]`, group after group."""
    rows, columns = torch.tensor(places(groups)).T
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
        failures = [c.failure for c in round.completions if c.failure is not None]
        raise RuntimeError(
            f"None of the {len(round.completions)} completions of round {round.number} has a "
            f"reward. {len(failures)} failed, and for {len(round.completions) - len(failures)} "
            "every reward function returned None."
            + (f" The first failed by {failures[0]}" if failures else "")
        )


@torch.no_grad()
def score_round(
    round: Round,
    learner: Learner,
    micro_batch_tokens: int,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Take the log-probs that must be taken before the weights move."""
    everything = OptimizerStep(round.samples, micro_batch_tokens, row_cost=learner.row_cost)
    with forward_context():
        for rows, batch in zip(everything.micro_batches, everything, strict=True):
            for name, values in learner.score(batch).items():
                for row, logprobs in zip(rows, values.tolist(), strict=True):
                    setattr(row.completion, name, logprobs[: len(row.completion.token_ids)])


def set_advantages(round: Round, learner: Learner, weights: Sequence[float]) -> None:
    """Let the learner turn the round's rewards into advantages.

    Nothing is compared with what is dropped. A completion whose advantage is not finite, or that
    makes those of its siblings so, is dropped as `nonfinite_advantage`.
    """
    logprobs = _logprobs(round) if learner.needs_reference else None
    rewards, at = reward_matrix(round.groups, weights), cells(round.groups)
    completions = round.completions
    dropped = torch.tensor([c.dropped is not None for c in completions])
    rewards[at] = rewards[at].masked_fill(dropped, torch.nan)
    advantages = learner.compute_advantages(rewards, logprobs)
    wrong = _nonfinite(advantages, rewards)
    # whose own reward is as large is dropped first: siblings may be fine without it
    huge = wrong.any(dim=1, keepdim=True) & (rewards.abs() > LARGEST_ADVANTAGE / 2)
    if huge.any():
        rewards = rewards.masked_fill(huge, torch.nan)
        advantages = learner.compute_advantages(rewards, logprobs)
        wrong = _nonfinite(advantages, rewards) | huge
    advantages = advantages.masked_fill(wrong, 0.0)
    values, nonfinite = advantages[at].tolist(), wrong[at].tolist()
    for completion, advantage, drop in zip(completions, values, nonfinite, strict=True):
        if drop:
            completion.dropped = completion.dropped or NONFINITE
        # equal rewards may leave rounding noise, and a row of zero advantage need not be trained on
        completion.advantage = advantage if abs(advantage) > ZERO_ADVANTAGE else 0.0


def drop_infinite_rewards(round: Round, weights: Sequence[float]) -> None:
    """Drop completions of which the functions gave scores, but no finite weighted sum of them."""
    rewards = reward_matrix(round.groups, weights)[cells(round.groups)].tolist()
    for completion, reward in zip(round.completions, rewards, strict=True):
        if math.isnan(reward) and any(s is not None for s in completion.scores or ()):
            completion.dropped = completion.dropped or NONFINITE


def _nonfinite(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Where a reward has no advantage that could be trained on: NaN is not below the limit."""
    return ~rewards.isnan() & ~(advantages.abs() <= LARGEST_ADVANTAGE)


def huge_rewards(round: Round, names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """For each reward function that is to blame for a `nonfinite_advantage`, a score it gave."""
    blamed: dict[str, float] = {}
    for completion in round.completions:
        if completion.dropped == NONFINITE and completion.scores:
            given = [
                (abs(score * weight), name, score)
                for score, name, weight in zip(completion.scores, names, weights, strict=True)
                if score is not None
            ]
            _, name, score = max(given)
            blamed.setdefault(name, score)
    return blamed


def _logprobs(round: Round) -> RoundLogprobs:
    longest = max(len(c.token_ids) for c in round.completions)
    old, ref, mask = torch.zeros(3, len(round.groups) * round.width, longest, dtype=torch.float64)
    rows, columns = cells(round.groups)
    flat = (rows * round.width + columns).tolist()
    for i, c in zip(flat, round.completions, strict=True):
        if c.old_logprobs is not None and c.ref_logprobs is not None:  # else it was dropped
            length = len(c.token_ids)
            old[i, :length] = torch.tensor(c.old_logprobs)
            ref[i, :length] = torch.tensor(c.ref_logprobs)
            mask[i, :length] = 1
    return RoundLogprobs(old, ref, mask)
