"""What a round asks of those above it: the one way up from the round loop."""

from collections.abc import Sequence

from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.scoring import EarlyStop
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Group


class RoundHooks:
    """The trainer's part in a round, in the order in which the round calls it. By default nothing.

    Each round has its own object. What the attributes say is read after `planned`.
    """

    rounds: int | None = None
    """Number of rounds until training ends, with this one; read before `planned`."""
    stop: EarlyStop | None = None
    """Stops groups that need no more completions."""
    max_num_gen_batches: int = 1
    """Bound on the prompts of a round, as a multiple of an update's; above 1, `is_replaced`
    decides which prompts are replaced."""

    def planned(self, groups: list[Group]) -> None:
        """Called with the groups of the round, before anything is drawn."""

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        """Turn drafts of groups into completions of a policy version, before anything is drawn."""
        return DraftAudit()

    def is_replaced(self, group: Group) -> bool:
        """Return whether another prompt takes the place of a complete group."""
        return False

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        """Called each time a group completes."""
