"""When a round ends and what becomes of what did not finish."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_rlsched.types import Completion, Group, Prompt


@dataclass(slots=True)
class RoundState:
    """What a rule may look at: what is planned, and what is decoded of it.

    Unless a rule races for scores they do not count, and so neither does how long reward
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


class RoundRule(ABC):
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

    def final_groups(self, state: RoundState) -> Sequence[Group]:
        """What is decoded and will be trained on in this round, whatever comes: in that order.

        A group may still leave the list: its scores may show that nothing of it can be trained on.
        Once every group before a given one is scored, no new group can come in before that one.
        """
        return state.decoded[: state.final]

    def discards(self, state: RoundState) -> bool:
        """Whether the end of the round may throw away what was drawn."""
        return False

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Split a round's groups into those that are trained on and those that stay in the pool."""
        return list(groups), []


class FullRound(RoundRule):
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


def at_least(ratio: float, n: int) -> int:
    """`ratio * n`, rounded up."""
    return math.ceil(round(ratio * n, 6))
