"""When a round ends and what becomes of what did not finish."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from lit_rlsched.rollout.types import Completion, Group

Mode = Literal["on_policy", "partial"]
Unit = Literal["group", "completion"]


@dataclass(slots=True)
class RoundState:
    """What a round policy may look at: counts of what is planned, and of what is decoded of it.

    Scores do not count, and so neither does how long reward functions take: when a round ends
    follows from its seeds and its schedule alone.
    """

    groups: int
    completions: int
    groups_decoded: int = 0
    completions_decoded: int = 0


class RoundPolicy(ABC):
    """Decides which prompts a round takes, when it is over, and what becomes of the rest."""

    update_prompts: int
    """Prompts that a round trains on, unless fewer are left, or more are ready at once."""
    max_staleness: int | None = 0
    """Policy versions that may lie between a completion's first token and the round: an older one
    is begun anew. 0: every token of a round is of one version; `None`: no limit."""
    ends_early = False
    """Whether rounds end before all that they may decode is decoded."""

    @property
    def off_policy(self) -> bool:
        """Whether a round may train on tokens that an earlier policy drew."""
        return self.ends_early and self.max_staleness != 0

    @abstractmethod
    def fresh_prompts(self, pool: int) -> int:
        """How many prompts to draw from the source, given how many wait in the pool."""

    @abstractmethod
    def most_prompts(self) -> int:
        """Prompts that a round may decode, at most."""

    @abstractmethod
    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The groups that the round may decode, from the front of the pool."""

    @abstractmethod
    def done(self, state: RoundState) -> bool:
        """Whether the round has what it needs, asked after each step while some still decode."""

    def discards(self, state: RoundState) -> bool:
        """Whether the end of the round may throw away what was drawn."""
        return False

    def settle(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Split a round's groups into those that are trained on and those that stay in the pool."""
        return list(groups), []


class FullRound(RoundPolicy):
    """Every planned prompt is completed before anything is trained on: plain synchronous GRPO.

    Args:
        prompts_per_round: Prompts of a round.
    """

    def __init__(self, prompts_per_round: int) -> None:
        self.update_prompts = prompts_per_round

    def fresh_prompts(self, pool: int) -> int:
        """As many as the pool lacks."""
        return max(0, self.update_prompts - pool)

    def most_prompts(self) -> int:
        """Those of a round."""
        return self.update_prompts

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """Those of a round."""
        return pool[: self.update_prompts]

    def done(self, state: RoundState) -> bool:
        """Not before everything is decoded."""
        return False


class SortedRound(RoundPolicy):
    """Train as soon as an update's worth is decoded; the rest goes on in the next round.

    SortedRL's controller (arXiv 2603.23414, section 3): prompts are loaded a pool at a time, and
    none before every prompt of the last pool was trained on. All of the pool runs at once, as far
    as there are slots; whatever has finished when an update's worth has is trained on, what
    finished in the same step included. So the short come first in every pool, the long ones last,
    and nobody starves: a pool of `n` updates is trained on in `n` rounds at most.

    Args:
        update_prompts: Prompts of an update.
        pool_prompts: Prompts of a pool.
        num_generations: Completions of a prompt.
        unit: What is trained on as a whole: a `group`, where completions are compared with their
            siblings, or a `completion`, of which `update_prompts * num_generations` make an update.
        mode: `on_policy` throws away what did not finish, `partial` keeps its tokens.
        max_staleness: See `RoundPolicy`, for `partial`.
        oversubscribe: Prompts that decode towards an update, as a multiple of `update_prompts`;
            `None`: the whole pool.
    """

    def __init__(
        self,
        update_prompts: int,
        pool_prompts: int,
        num_generations: int,
        unit: Unit = "group",
        mode: Mode = "on_policy",
        max_staleness: int | None = None,
        oversubscribe: float | None = None,
    ) -> None:
        self.update_prompts = update_prompts
        self.pool_prompts = pool_prompts
        self.num_generations = num_generations
        self.unit = unit
        self.max_staleness = 0 if mode == "on_policy" else max_staleness
        self._raced = pool_prompts
        if oversubscribe is not None:
            self._raced = min(pool_prompts, math.ceil(round(oversubscribe * update_prompts, 6)))
        self.ends_early = update_prompts < self._raced

    def fresh_prompts(self, pool: int) -> int:
        """A whole pool, once the last one is empty."""
        return 0 if pool else self.pool_prompts

    def most_prompts(self) -> int:
        """All of a pool, or what `oversubscribe` allows."""
        return self._raced

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The same; of prompts that were trained on in part, as many as make up for it."""
        sizes = [len(group.completions) for group in pool]
        most, before = self._raced * self.num_generations, accumulate(sizes, initial=0)
        return [group for group, n in zip(pool, before, strict=False) if n < most]

    def done(self, state: RoundState) -> bool:
        """When an update's worth is decoded."""
        if self.unit == "completion":
            return state.completions_decoded >= self.update_prompts * self.num_generations
        return state.groups_decoded >= self.update_prompts

    def discards(self, state: RoundState) -> bool:
        """On-policy, where more is decoded than makes an update."""
        if self.unit == "completion":
            more = state.completions > self.update_prompts * self.num_generations
        else:
            more = state.groups > self.update_prompts
        return more and self.max_staleness == 0

    def settle(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """What has finished, and the rest, both in the order of the pool."""
        trained, left = [], []
        for group in groups:
            done, rest = _split(group.completions)
            if self.unit == "group" and rest:
                done, rest = [], group.completions
            if done:
                trained.append(replace(group, completions=done) if rest else group)
            if rest:
                left.append(replace(group, completions=rest))
        return trained, left


def _split(completions: Iterable[Completion]) -> tuple[list[Completion], list[Completion]]:
    parts: tuple[list[Completion], list[Completion]] = [], []
    for completion in completions:
        parts[not completion.finished].append(completion)
    return parts
