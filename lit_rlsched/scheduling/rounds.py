"""When a round ends and what becomes of what did not finish."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from lit_rlsched.rollout.types import Completion, Group, Prompt

Mode = Literal["on_policy", "partial"]
Unit = Literal["group", "completion"]


@dataclass(slots=True)
class RoundState:
    """What a round policy may look at: what is planned, and what is decoded of it.

    Unless a policy races for scores they do not count, and so neither does how long reward
    functions take: when a round ends follows from its seeds and its schedule alone.
    """

    planned: list[Group]
    completions: int
    decoded: list[Group] = field(default_factory=list)
    """Groups of which all is decoded, in the order of the steps in which they were, then of the
    pool."""
    completions_decoded: int = 0
    finished: dict[str, list[Completion]] = field(default_factory=dict)
    """Completions of each group that are decoded, in that order."""
    stopped: dict[str, list[Completion]] = field(default_factory=dict)
    """Completions of each group that were taken out of it, as it needed no more."""
    patient: bool = False
    """Whether a race still waits for the scores of those that are ahead."""
    final: int = 0
    """How many of `decoded`, the first ones, nothing can come before any more: those of earlier
    steps."""


class RoundPolicy(ABC):
    """Decides which prompts a round takes, when it is over, and what becomes of the rest."""

    update_prompts: int
    """Prompts that a round trains on, unless fewer are left, or more are ready at once."""
    max_staleness: int | None = 0
    """Policy versions that may lie between a completion's first token and the round: an older one
    is begun anew. 0: every token of a round is of one version; `None`: no limit."""
    most_deferred = 0
    """Prompts that may wait in the pool beside those of a round."""
    ends_early = False
    """Whether rounds end before all that they may decode is decoded."""
    stops_groups = False
    """Whether a group may have `enough` while some of it still decodes."""
    keeps_drafts = False
    """Whether what a round puts off keeps its tokens, for a later one to verify."""
    patience: float | None = None
    """Seconds of a round for which it waits, when it could be over, for the scores of what is
    decoded; then others may overtake. `None`: scores do not count until it is over."""

    @property
    def off_policy(self) -> bool:
        """Whether a round may train on tokens that an earlier policy drew."""
        return self.ends_early and self.max_staleness != 0

    @abstractmethod
    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        """How many prompts to draw from the source, given those that wait in the pool."""

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """The same by domain, where a round has quotas for some; `None`: of any."""
        return [(None, self.fresh_prompts(pool))]

    def domain_of(self, prompt: Prompt) -> str | None:
        """Whose quota a prompt counts towards."""
        return None

    def check_domains(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027
        """Refuse prompts that the quotas do not fit.

        Raises:
            ValueError: names a prompt or a domain, and the fix.
        """

    def is_long(self, planned: Sequence[Group]) -> bool:
        """Whether a round waits for prompts that earlier ones did not wait for."""
        return False

    def metrics(self, planned: Sequence[Group]) -> dict[str, float]:
        """What kind of round it is."""
        return {}

    def launched(self, num_generations: int) -> int:
        """Completions of a fresh prompt that are begun."""
        return num_generations

    def enough(self, group: Group, state: RoundState) -> list[Completion] | None:
        """What is trained on of a group that needs no more of its completions."""
        return None

    def awaits(self, state: RoundState) -> bool:
        """Whether a race, of the round or of a group, is over but for scores."""
        return False

    @abstractmethod
    def most_prompts(self) -> int:
        """Prompts that a round may decode, at most."""

    def check_enough(self, prompts: int) -> None:
        """Refuse a data set that cannot fill a round.

        Raises:
            ValueError: names the argument, its value and the most that works.
        """
        if prompts < self.update_prompts:
            raise ValueError(
                f"`prompts_per_round={self.update_prompts}` is more than `train_data` holds: "
                f"{prompts} prompts. Use {prompts} or fewer."
            )

    @abstractmethod
    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The groups that the round may decode, in the order of the pool."""

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """Whether all that was drawn for early rounds was trained on with this one.

        Args:
            planned: The round's groups.
            left: What is in the pool after it.
        """
        return not left

    @abstractmethod
    def done(self, state: RoundState) -> bool:
        """Whether the round has what it needs, asked after each step while some still decode."""

    def certain(self, state: RoundState) -> Sequence[Group]:
        """What is decoded and will be trained on in this round, whatever comes: in that order.

        Where scores are awaited, one may yet drop out, if nothing can be trained on of it; none
        comes in before another that was here when all before it were scored.
        """
        return state.decoded[: state.final]

    def discards(self, state: RoundState) -> bool:
        """Whether the end of the round may throw away what was drawn."""
        return False

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Split a round's groups into those that are trained on and those that stay in the pool."""
        return list(groups), []


class FullRound(RoundPolicy):
    """Every planned prompt is completed before anything is trained on: plain synchronous GRPO.

    Args:
        prompts_per_round: Prompts of a round.
    """

    def __init__(self, prompts_per_round: int) -> None:
        self.update_prompts = prompts_per_round

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        """As many as the pool lacks."""
        return max(0, self.update_prompts - len(pool))

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
            self._raced = min(pool_prompts, at_least(oversubscribe, update_prompts))
        self.ends_early = update_prompts < self._raced

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        """A whole pool, once the last one is empty."""
        return 0 if pool else self.pool_prompts

    def most_prompts(self) -> int:
        """All of a pool, or what `oversubscribe` allows."""
        return self._raced

    def check_enough(self, prompts: int) -> None:
        """Refuse a data set that cannot fill a pool."""
        super().check_enough(prompts)
        if prompts < self.pool_prompts:
            raise ValueError(
                f"`SortedBatching` loads {self.pool_prompts} prompts at a time, and "
                f"`train_data` holds {prompts}. Use fewer `pool_rounds`, or a lower "
                "`prompts_per_round`."
            )

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The same; of prompts that were trained on in part, as many as make up for it."""
        sizes = [len(group.completions) for group in pool]
        most, before = self._raced * self.num_generations, accumulate(sizes, initial=0)
        return [group for group, n in zip(pool, before, strict=False) if n < most]

    def done(self, state: RoundState) -> bool:
        """When an update's worth is decoded."""
        if self.unit == "completion":
            return state.completions_decoded >= self.update_prompts * self.num_generations
        return len(state.decoded) >= self.update_prompts

    def discards(self, state: RoundState) -> bool:
        """On-policy, where more is decoded than makes an update."""
        if self.unit == "completion":
            more = state.completions > self.update_prompts * self.num_generations
        else:
            more = len(state.planned) > self.update_prompts
        return more and self.max_staleness == 0

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
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


def at_least(ratio: float, n: int) -> int:
    """`ratio * n`, rounded up."""
    return math.ceil(round(ratio * n, 6))


def _split(completions: Iterable[Completion]) -> tuple[list[Completion], list[Completion]]:
    parts: tuple[list[Completion], list[Completion]] = [], []
    for completion in completions:
        parts[not completion.finished].append(completion)
    return parts
