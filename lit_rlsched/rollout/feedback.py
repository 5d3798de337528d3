"""How scores affect a running round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lit_rlsched.types import Group


class EarlyStop(Protocol):
    """Decides when a group needs no more completions."""

    def waits(self, group: Group) -> bool:
        """Return whether the group might stop once its pending scores are there."""

    def stops(self, group: Group) -> bool:
        """Return whether the scored completions are enough, so that the others are aborted."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """Hooks through which scores affect a running round.

    The loop blocks for scores that could change the next decode step, so the speed of reward
    functions changes nothing that is drawn.
    """

    stop: EarlyStop | None = None
    """Asked about a group that still decodes each time some of its completions finish."""
    more: Callable[[Group], Group | None] | None = None
    """Called with each complete group; may return another group to run in this round."""
