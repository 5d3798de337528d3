"""Tail batching without rounds for losers: they race again in the next round."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lit_rlsched.scheduling.racing import useless
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.types import Group


class DeferringTailRound(TailRound):
    """Race the earlier losers, with their drafts, beside fresh prompts in every round.

    A round is long if it holds a prompt that was deferred `max_deferrals` times: it does not end
    before all earlier losers are scored, so that no prompt waits forever. A round never waits for
    more prompts than an update has; with a `prompt_ratio` above 2 a prompt may be deferred more
    often.

    Args:
        *args: See `RacingRound`.
        max_deferrals: Maximum number of races that a prompt may lose.
        **settings: See `RacingRound`. Drafts are always kept, whatever `reuse_drafts` says: without
            them a prompt would lose until its completions happen to be short.
    """

    def __init__(self, *args: Any, max_deferrals: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.max_deferrals = max_deferrals
        self.keeps_drafts = True
        self.most_deferred = 0  # losers take the places of fresh prompts

    def draws_following(
        self, planned: Sequence[Group], rest: Sequence[Group]
    ) -> list[tuple[str | None, int]]:
        """Fresh prompts that have a place beside the losers of this round."""
        there = Counter(self.domain_of(group.prompt) for group in rest)
        return [(domain, max(0, n - there[domain])) for domain, n in self.quotas.items()]

    def plan_following(self, planned: Sequence[Group], rest: Sequence[Group]) -> Sequence[Group]:
        return self.plan(rest)

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """After each round, since there are always losers left."""
        return True

    def _racing(self, pool: Iterable[Group]) -> list[Group]:
        return list(pool)

    def _waiting(self, pool: Iterable[Group]) -> list[Group]:
        return []

    def _due(self, planned: Iterable[Group]) -> list[Group]:
        lost = super()._due(planned)
        return lost if any(group.deferred >= self.max_deferrals for group in lost) else []

    def _take_places(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """Reserve places for the groups that may not lose; the first others take the rest."""
        places = dict(self.quotas)
        due = (group for group in self._due(state.planned) if not useless(group))
        reserved = {group.id for group in due if self._takes_place(group, places)}
        return [g for g in groups if g.id in reserved or self._takes_place(g, places)]
