"""A drawn round, and the rewards and advantages of its completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_rlsched.data.repetition import places
from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import RunFailed
from lit_rlsched.training.advantages import LARGEST_REWARD, combine_rewards
from lit_rlsched.training.learner import Learner, RoundLogprobs
from lit_rlsched.training.micro_batches import ZERO_ADVANTAGE, OptimizerStep
from lit_rlsched.types import ENVIRONMENT, Completion, Group, Prompt, Sample

NONFINITE = "nonfinite_advantage"
"""Why a completion without a finite advantage is dropped."""


@dataclass(slots=True)
class Round:
    """The groups that a rollout gave to train on, in the order in which they were planned.

    A group has all its completions, or only those that were ready if completions stand alone.
    """

    number: int
    """Rounds before this one."""
    version: int
    """Policy version at the start of the round: optimizer steps taken until then."""
    groups: list[Group]
    trace: RolloutTrace | None = None
    """`None` after a resume."""
    metrics: dict[str, float] = field(default_factory=dict)
    empty_steps: int = 0
    """Optimizer steps so far without a micro-batch, which Lightning does not count."""
    accumulated: list[OptimizerStep] = field(default_factory=list)
    """Parts of the round's first optimizer step whose gradients are accumulated."""
    lost: tuple[tuple[int, int], list[list[str]]] | None = None
    """Gradients to compute again after a resume, because checkpoints hold none: the `divisor` of
    `OptimizerStep`, and the ids of each part's groups, which give the same sums bit for bit."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave trace and accumulated steps out for other ranks, which have their own steps."""
        return Round, (self.number, self.version, self.groups, None, self.metrics)

    def state_dict(self) -> dict[str, Any]:
        """The state that training on the round needs."""
        lost = self.lost
        if self.accumulated:
            divisor = self.accumulated[0].divisor
            parts = [[group.id for group in step.groups] for step in self.accumulated]
            lost = (divisor.sequences, int(divisor.tokens)), parts
        return {
            "number": self.number,
            "version": self.version,
            "groups": pack(self.groups),
            "streamed": lost and list(lost),
            "empty_steps": self.empty_steps,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> "Round":
        """Restore a round from `state_dict`; `prompt` finds a prompt by its uid."""
        groups, streamed = unpack(state["groups"], prompt), state.get("streamed")
        lost = (streamed[0], streamed[1]) if streamed else None
        empty = state["empty_steps"]
        return cls(state["number"], state["version"], groups, empty_steps=empty, lost=lost)

    @property
    def ordinal(self) -> int:
        """Number of the round for people: the first is 1."""
        return self.number + 1

    @property
    def completions(self) -> list[Completion]:
        """All completions, group after group."""
        return [c for g in self.groups for c in g.completions]

    @property
    def samples(self) -> list[Sample]:
        """All completions, each with its group."""
        return [Sample(g, c) for g in self.groups for c in g.completions]


def reward_matrix(groups: Sequence[Group], weights: Sequence[float]) -> torch.Tensor:
    """Compute rewards `[P, G]` in float64, with a column for each index in a group.

    A reward is NaN if no function gave a score, if the weighted sum exceeds `LARGEST_REWARD`, or if
    there is no such completion.
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
    matrix[cells(groups)] = rewards.masked_fill(rewards.abs() > LARGEST_REWARD, nan)
    return matrix


def cells(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every completion in a matrix `[P, G]`, group after group."""
    rows, columns = torch.tensor(places(groups)).T
    return rows, columns


def check_rewards(round: Round, weights: Sequence[float], enough: int) -> None:
    """Stop a run if none of at least `enough` completions of a round has a reward."""
    unscored = reward_matrix(round.groups, weights).isnan().all()
    if len(round.completions) >= enough and unscored:
        raise RunFailed(no_rewards(round.completions, f"of round {round.ordinal}"))


def no_rewards(completions: Sequence[Completion], where: str) -> str:
    """Say that none of the completions has a reward, and how the first call failed."""
    failures = [c.failure for c in completions if c.failure is not None]
    none = len(completions) - len(failures)
    first = f" The first failure: {failures[0]}" if failures else ""
    return (
        f"None of the {len(completions)} completions {where} has a reward. {len(failures)} failed, "
        f"and for {none} every reward function returned None.{first}"
    )


def drop_stale(round: Round, most: int | None) -> None:
    """Drop completions with tokens that are more than `most` policy versions old.

    With 0 there are none: whatever an earlier policy has drawn was verified or drawn again.
    """
    if most is None:
        return
    for completion in round.completions:
        for version, _ in completion.segments:
            assert most or version in (round.version, ENVIRONMENT), (
                f"round {round.ordinal} has a token of version {version}"
            )
        if completion.staleness(round.version) > most:
            completion.dropped = completion.dropped or "stale"


def set_advantages(
    round: Round, learner: Learner, weights: Sequence[float], statistics: PromptStatistics
) -> None:
    """Let the learner compute advantages from the round's rewards.

    Dropped completions have no part in it. A completion whose advantage is not finite is dropped as
    `nonfinite_advantage`.
    """
    rewards, at = reward_matrix(round.groups, weights), cells(round.groups)
    logprobs = _logprobs(round, *rewards.shape) if learner.needs_reference else None
    completions = round.completions
    dropped = torch.tensor([c.dropped is not None for c in completions])
    rewards[at] = rewards[at].masked_fill(dropped, torch.nan)
    if learner.tracks_rewards:
        expected = statistics.means(group.prompt.uid for group in round.groups)
        rewards = rewards - torch.from_numpy(expected)[:, None]
    advantages = learner.compute_advantages(rewards, logprobs)
    wrong = ~rewards.isnan() & ~(advantages.abs() <= LARGEST_REWARD)
    advantages = advantages.masked_fill(wrong, 0.0)
    values, nonfinite = advantages[at].tolist(), wrong[at].tolist()
    for completion, advantage, drop in zip(completions, values, nonfinite, strict=True):
        if drop:
            completion.dropped = completion.dropped or NONFINITE
        completion.advantage = advantage if abs(advantage) > ZERO_ADVANTAGE else 0.0


def huge_rewards(round: Round, names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """For each reward function that caused a `nonfinite_advantage`, one of its scores."""
    blamed: dict[str, float] = {}
    for completion in round.completions:
        if completion.dropped == NONFINITE and completion.scores:
            _, name, score = max(
                (abs(score * weight), name, score)
                for score, name, weight in zip(completion.scores, names, weights, strict=True)
                if score is not None
            )
            blamed.setdefault(name, score)
    return blamed


def _logprobs(round: Round, prompts: int, width: int) -> RoundLogprobs:
    longest = max(len(c.token_ids) for c in round.completions)
    old, ref, mask = torch.zeros(3, prompts * width, longest, dtype=torch.float64)
    rows, columns = cells(round.groups)
    flat = (rows * width + columns).tolist()
    for i, c in zip(flat, round.completions, strict=True):
        if c.old_logprobs is not None and c.ref_logprobs is not None:  # None: dropped before
            length = len(c.token_ids)
            old[i, :length] = torch.tensor(c.old_logprobs)
            ref[i, :length] = torch.tensor(c.ref_logprobs)
            mask[i, :length] = torch.tensor(c.mask())
    return RoundLogprobs(old, ref, mask)
