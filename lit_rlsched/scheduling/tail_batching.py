"""Tail batching: rounds that do not wait for the longest completions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from lit_rlsched.scheduling.racing import RacingRound
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.types import Group


class TailRound(RacingRound):
    """Short rounds race more prompts than they train on, long rounds run those that lost.

    RollPacker's tail batching (arXiv 2509.21009, section 3). A round is long if the pool holds
    enough prompts that lost a race: the oldest of them are then run to their end, and nothing else.
    Any other round is short: it takes fresh prompts only, more than it needs, and is over once
    `update_prompts` of them are scored. The losers' tokens are thrown away, or kept as drafts.

    Where domains race for themselves, as in RollPacker's code, what lost waits in one queue, and
    long rounds take the oldest, whatever their domain. Its arguments are those of `RacingRound`.
    """

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        """Those that a race lacks; none before a round of what lost."""
        return sum(n for _, n in self.draws(pool))

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """What a race lacks, by domain; nothing before a long round."""
        if self._waiting(pool):
            return []
        there = Counter(self.domain_of(group.prompt) for group in self._racing(pool))
        return [(domain, max(0, n - there[domain])) for domain, n in self._raced_of.items()]

    def check_enough(self, prompts: int) -> None:
        """Refuse a data set that cannot fill a race while others wait for a long round."""
        super().check_enough(prompts)
        most = self._raced + self.most_deferred
        if prompts < most:
            waiting = f"{self.most_deferred} prompts waiting for a long round and "
            raise ValueError(
                f"`TailBatching` has {f'up to {waiting}' if self.most_deferred else ''}"
                f"{self._raced} prompts in a race, and `train_data` holds {prompts}. Use a lower "
                "`prompts_per_round` or `prompt_ratio`."
            )

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The oldest that wait for a long round, where there are enough; else those that race.

        Domains take turns, as each has its share.
        """
        if waiting := self._waiting(pool):
            return waiting
        seen: Counter[str | None] = Counter()
        turns = []
        for group in self._racing(pool):
            domain = self.domain_of(group.prompt)
            seen[domain] += 1
            turns.append((seen[domain] / self._raced_of[domain], group))
        return [group for turn, group in sorted(turns, key=lambda t: t[0]) if turn <= 1]

    def is_long(self, planned: Sequence[Group]) -> bool:
        """Whether it waits for what lost in earlier ones."""
        return bool(self._due(planned))

    def metrics(self, planned: Sequence[Group]) -> dict[str, float]:
        """`tail_batching/long_round`."""
        return {"tail_batching/long_round": float(self.is_long(planned))}

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """After a round of what lost, more or less: some may wait for the next one."""
        return not left or self.is_long(planned)

    def _first(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """The first, as many as an update has of each domain; in a long round of any domain."""
        if self._due(state.planned):
            return list(islice(groups, self.update_prompts))
        return super()._first(groups, state)

    def _racing(self, pool: Iterable[Group]) -> list[Group]:
        """What goes into a race."""
        return [group for group in pool if not group.deferred]

    def _waiting(self, pool: Iterable[Group]) -> list[Group]:
        """An update's worth of what waits for a long round, if there is one."""
        lost = [group for group in pool if group.deferred][: self.update_prompts]
        return lost if len(lost) == self.update_prompts else []

    def _due(self, planned: Iterable[Group]) -> list[Group]:
        """What may not lose once more."""
        return [group for group in planned if group.deferred]
