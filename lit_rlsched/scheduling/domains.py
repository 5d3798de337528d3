"""Tail batching with a quota for each domain: who races whom, and how many win."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_rlsched.rollout.types import Group, Prompt
from lit_rlsched.scheduling.rounds import RoundState, TailRound, at_least, is_long

COLUMN = "domain"
"""The prompts' column that names their domain."""


def quotas(shares: Mapping[str, float], prompts: int) -> dict[str, int]:
    """Whole prompts of each domain that add up to `prompts`, by largest remainder.

    Args:
        shares: Of each domain; they add up to 1.
        prompts: Of an update.

    Raises:
        ValueError: a domain would have none.
    """
    exact = {domain: share * prompts for domain, share in shares.items()}
    whole = {domain: math.floor(round(n, 9)) for domain, n in exact.items()}
    by_rest = sorted(exact, key=lambda domain: round(whole[domain] - exact[domain], 9))
    for domain in by_rest[: prompts - sum(whole.values())]:
        whole[domain] += 1
    for domain, n in whole.items():
        if not n:
            raise ValueError(
                f"`TailBatching(per_domain={dict(shares)})` leaves no prompt of {domain!r} in a "
                f"round of {prompts}. Raise its share, or `prompts_per_round`."
            )
    return whole


class DomainTailRound(TailRound):
    """`TailRound` whose short rounds have a quota for each domain.

    RollPacker's code draws and accepts prompts by domain. Each domain races for itself: a short
    round begins more prompts of each than its quota, and is over once every quota is filled. So a
    domain whose completions are long keeps its share of short rounds, and of each update. What lost
    waits in one queue, and long rounds take the oldest, whatever their domain.

    Args:
        shares: Of each domain in a short round's update; they add up to 1.
        update_prompts: See `TailRound`, for all further arguments too.

    Raises:
        ValueError: a domain has no prompt in an update.
    """

    def __init__(
        self,
        shares: Mapping[str, float],
        update_prompts: int,
        num_generations: int,
        prompt_ratio: float = 1.25,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(update_prompts, num_generations, prompt_ratio, *args, **kwargs)
        self.quotas = quotas(shares, update_prompts)
        self._raced_of = {d: at_least(prompt_ratio, n) for d, n in self.quotas.items()}
        self._raced = sum(self._raced_of.values())
        self.ends_early = self._raced > update_prompts
        self.most_deferred = update_prompts - 1 if self.ends_early else 0

    def domain_of(self, prompt: Prompt) -> str:
        """Its column `domain`."""
        return str(prompt.columns[COLUMN])

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """What each domain lacks for a short round; nothing before a long one."""
        if sum(group.deferred > 0 for group in pool) >= self.update_prompts:
            return []
        there = Counter(self.domain_of(group.prompt) for group in pool if not group.deferred)
        return [(domain, max(0, n - there[domain])) for domain, n in self._raced_of.items()]

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """As in `TailRound`; the domains of a short round take turns, as each has its share."""
        planned = super().plan(pool)
        if is_long(planned):
            return planned
        seen: Counter[str] = Counter()
        turns = []
        for group in (group for group in pool if not group.deferred):
            domain = self.domain_of(group.prompt)
            seen[domain] += 1
            turns.append((seen[domain] / self._raced_of[domain], group))
        return [group for turn, group in sorted(turns, key=lambda t: t[0]) if turn <= 1]

    def check_domains(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a domain or of another, and domains with too few prompts."""
        there: Counter[str] = Counter()
        for prompt in prompts:
            if COLUMN not in prompt.columns:
                raise ValueError(
                    f"`TailBatching(per_domain=...)` needs a column `{COLUMN}` in `train_data`, "
                    f"and the prompt {prompt.uid} has none. Add it, or leave `per_domain` out."
                )
            if (domain := self.domain_of(prompt)) not in self.quotas:
                raise ValueError(
                    f"The prompt {prompt.uid} is of the domain {domain!r}, which "
                    f"`TailBatching(per_domain=...)` gives no share: it has "
                    f"{sorted(self.quotas)}. Give it one, or leave its prompts out."
                )
            there[domain] += 1
        for domain, raced in self._raced_of.items():
            if there[domain] < (most := raced + self.most_deferred):
                raise ValueError(
                    f"`TailBatching(per_domain=...)` has up to {most} prompts of {domain!r} "
                    f"waiting, {raced} of them in a short round, and `train_data` holds "
                    f"{there[domain]}. Use a lower share, `prompts_per_round` or `prompt_ratio`."
                )

    def _first(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """The first of each domain, as many as its quota; in a long round, the first of all."""
        if state.deferred:
            return super()._first(groups, state)
        left = dict(self.quotas)
        first = []
        for group in groups:
            domain = self.domain_of(group.prompt)
            if left[domain]:
                left[domain] -= 1
                first.append(group)
        return first
