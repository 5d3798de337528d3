"""Tail batching: short rounds do not wait for the longest completions, long rounds run these."""

from collections import Counter
from collections.abc import Iterable, Sequence

from lit_rlsched.scheduling.racing import RacingRound
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group


class TailRound(RacingRound):
    """Race more prompts than an update needs in short rounds; run the losers in long rounds.

    RollPacker's tail batching (arXiv 2509.21009, section 3). A round is long if the pool holds at
    least `update_prompts` losers: it decodes the oldest of them to their end, and nothing else. Any
    other round is short: it starts fresh prompts only, more than an update needs, and ends once
    `update_prompts` of them are scored. The tokens of the losers are dropped.

    With `shares` each domain has its own race, as in RollPacker's code. All losers wait in one
    queue, and long rounds take the oldest of any domain. For the arguments see `RacingRound`.
    """

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return sum(n for _, n in self.draws(pool))

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """The prompts that a race lacks, by domain; none before a long round."""
        if self._waiting(pool):
            return []
        there = Counter(self.domain_of(group.prompt) for group in self._racing(pool))
        return [(domain, max(0, n - there[domain])) for domain, n in self._raced_of.items()]

    def check_enough(self, prompts: int) -> None:
        """Refuse a data set that cannot fill a race while losers wait for a long round."""
        super().check_enough(prompts)
        if prompts < self._raced + self.most_deferred:
            waiting = f"up to {self.most_deferred} prompts waiting for a long round and "
            raise UsageError(
                f"`TailBatching` has {waiting if self.most_deferred else ''}{self._raced} prompts "
                f"in a race, and `train_data` holds {prompts}. Use a lower `prompts_per_round` or "
                "`prompt_ratio`."
            )

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The losers of a long round, or the prompts of a race, interleaved by domain."""
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
        return any(group.deferred for group in planned)

    def metrics(self, planned: Sequence[Group]) -> dict[str, float]:
        return {"tail_batching/long_round": float(self.is_long(planned))}

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """After each long round, although some losers may already wait for the next one."""
        return not left or self.is_long(planned)

    def _take_places(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        if self.is_long(state.planned):  # it has no quotas
            return list(groups)
        return super()._take_places(groups, state)

    def _racing(self, pool: Iterable[Group]) -> list[Group]:
        """The groups of the pool that take part in a race."""
        return [group for group in pool if not group.deferred]

    def _waiting(self, pool: Iterable[Group]) -> list[Group]:
        """The oldest losers if they fill a long round, else an empty list."""
        lost = [group for group in pool if group.deferred][: self.update_prompts]
        return lost if len(lost) == self.update_prompts else []
