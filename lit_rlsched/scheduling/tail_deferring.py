"""Tail batching without long rounds: what loses a race goes into the next one."""

from collections.abc import Iterable, Sequence
from typing import Any

from lit_rlsched.scheduling.racing import useless
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.types import Group


class DeferringTailRound(TailRound):
    """Every round races what lost before, with its drafts, beside as many fresh prompts as lack.

    So that nobody starves, a round is long if a prompt in it has lost `max_deferrals` races: it
    does not end before all that lost before are scored. No round waits for more prompts than an
    update has, so where `prompt_ratio` is above 2 a prompt may lose some more.

    Args:
        *args: See `RacingRound`.
        max_deferrals: Races that a prompt may lose.
        **settings: See `RacingRound`, but for `reuse`: drafts are always kept. Drawn anew, a prompt
            would lose until its completions happen to be short.
    """

    def __init__(self, *args: Any, max_deferrals: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.max_deferrals = max_deferrals
        self.keeps_drafts = True
        self.most_deferred = 0  # what lost takes the place of fresh prompts

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """After each round: what waits is never used up."""
        return True

    def _racing(self, pool: Iterable[Group]) -> list[Group]:
        return list(pool)

    def _waiting(self, pool: Iterable[Group]) -> list[Group]:
        return []

    def _due(self, planned: Iterable[Group]) -> list[Group]:
        """All that has lost, where one has lost too often."""
        lost = super()._due(planned)
        most = max((group.deferred for group in lost), default=0)
        return lost if most >= self.max_deferrals else []

    def _first(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """Those that may not lose and the first others, as many as an update has of each domain."""
        left = dict(self.quotas)
        due = (group for group in self._due(state.planned) if not useless(group))
        reserved = {group.id for group in due if self._takes_place(group, left)}
        return [g for g in groups if g.id in reserved or self._takes_place(g, left)]
