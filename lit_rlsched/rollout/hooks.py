"""The trainer's part in a rollout."""

from collections.abc import Sequence
from typing import Protocol

from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Completion, Group


class EarlyStop(Protocol):
    """Decides when a group needs no more completions."""

    def waits(self, group: Group) -> bool:
        """Return whether the group might stop once its pending scores are there."""

    def stops(self, group: Group) -> bool:
        """Return whether the scored completions are enough, so that the others are aborted."""


class RoundHooks:
    """What a rollout calls, in this order; each round has its own object. By default nothing.

    The rollout waits for scores that could change the next decode step, so the speed of reward
    functions changes nothing that is drawn.
    """

    stop: EarlyStop | None = None
    """Asked about a group that still decodes each time some of its completions finish."""
    pilot: int | None = None
    """Completions of a group that begin with the round. The others begin once these are scored,
    unless `stop` then `stops` the group."""
    replaces = False
    """Whether `another` may return a group."""

    def planned(self, state: RoundState) -> None:
        """Called with the groups of the round, before anything is drawn."""

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        """Turn drafts of groups into completions of a policy version, before anything is drawn."""
        return DraftAudit()

    def completion_ended(self, completion: Completion) -> None:
        """Called with each completion once it is scored."""

    def group_ended(self, group: Group) -> None:
        """Called with each group once all of its completions are scored."""

    def another(self, group: Group, state: RoundState) -> Group | None:
        """Return a group to decode in this round in place of one that is complete, if any."""

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        """Called when a group is complete, and when its place is final, between two steps."""
