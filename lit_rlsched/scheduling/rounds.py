"""When a round ends and what becomes of what did not finish."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class RoundState:
    """What a round policy may look at."""

    groups_planned: int
    groups_complete: int = 0


class RoundPolicy(Protocol):
    """Decides how many prompts a round takes and when it is over."""

    def fresh_prompts(self, pool: int) -> int:
        """How many prompts to draw from the source, given how many wait in the pool."""

    def done(self, state: RoundState) -> bool:
        """Whether the round has what it needs."""


class FullRound:
    """Every planned prompt is completed before anything is trained on: plain synchronous GRPO.

    Args:
        prompts_per_round: Prompts of a round.
    """

    def __init__(self, prompts_per_round: int) -> None:
        self.prompts_per_round = prompts_per_round

    def fresh_prompts(self, pool: int) -> int:
        """As many as the pool lacks."""
        return max(0, self.prompts_per_round - pool)

    def done(self, state: RoundState) -> bool:
        """When all groups are complete."""
        return state.groups_complete == state.groups_planned
