"""Tail batching: short rounds do not wait for the longest completions, long rounds run these."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState, at_least
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt

COLUMN = "domain"
"""The prompts' column that names their domain."""
PATIENCE = 5.0
"""Longest time per round, in seconds, to wait for scores before others may overtake."""


def quotas(shares: Mapping[str, float] | None, prompts: int) -> dict[str | None, int]:
    """Split `prompts` into whole numbers by domain (largest remainder)."""
    if shares is None:
        return {None: prompts}
    exact = {domain: share * prompts for domain, share in shares.items()}
    whole: dict[str | None, int] = {domain: math.floor(round(n, 9)) for domain, n in exact.items()}
    by_rest = sorted(exact, key=lambda domain: round(whole[domain] - exact[domain], 9))
    for domain in by_rest[: prompts - sum(whole.values())]:
        whole[domain] += 1
    for name, n in whole.items():
        if not n:
            raise UsageError(
                f"`TailBatching(per_domain={dict(shares)})` leaves no prompt of {name!r} in a "
                f"round of {prompts}. Raise its share, or `prompts_per_round`."
            )
    return whole


def useless(group: Group) -> bool:
    """Whether nothing of a group can be trained on: all its completions are scored and dropped."""
    return group.complete and all(c.dropped for c in group.completions)


class TailRound(RoundRule):
    """Race more prompts than an update needs in short rounds; run the losers in long rounds.

    RollPacker's tail batching (arXiv 2509.21009, section 3). A round is long if the pool holds at
    least `update_prompts` losers: it decodes the oldest of them to their end, and nothing else. Any
    other round is short: it starts fresh prompts only, more than an update needs.

    Prompts rank in the order in which their last completion is decoded. The first `update_prompts`
    of them win, and the round ends once these are scored. While `patience` lasts, no other prompt
    overtakes them, however late their scores come. The losers stay in the pool without their
    tokens. With a `completion_ratio` above 1 the completions of a prompt race in the same way: more
    than `num_generations` start, and the first of them are kept.

    With `shares` each domain has its own race, as in RollPacker's code: a quota of each update, and
    more prompts than that in the round. All losers wait in one queue, and long rounds take the
    oldest of any domain.

    `TailBatching` documents the arguments; `num_generations` completions of a prompt are trained
    on, and `patience` is that of `RoundRule`.
    """

    def __init__(
        self,
        update_prompts: int,
        num_generations: int,
        prompt_ratio: float = 1.25,
        completion_ratio: float = 1.0,
        patience: float = PATIENCE,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.update_prompts, self.num_generations = update_prompts, num_generations
        self.patience, self.shares, self.has_domains = patience, shares, shares is not None
        self.quotas = quotas(shares, update_prompts)
        self._ratio = completion_ratio
        self.stops_groups = self.launched(num_generations) > num_generations
        self._raced_of = {domain: at_least(prompt_ratio, n) for domain, n in self.quotas.items()}
        self._raced = sum(self._raced_of.values())
        self.ends_early = self._raced > update_prompts
        # losers wait until they fill a round of their own
        self.most_deferred = update_prompts - 1 if self.ends_early else 0

    def domain_of(self, prompt: Prompt) -> str | None:
        return None if self.shares is None else str(prompt.columns[COLUMN])

    def check_domains(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a domain or of an unknown one, and domains with too few."""
        if not self.has_domains:
            return
        there: Counter[str | None] = Counter()
        for prompt in prompts:
            if COLUMN not in prompt.columns:
                raise UsageError(
                    f"`TailBatching(per_domain=...)` needs a column `{COLUMN}` in `train_data`, "
                    f"and the prompt {prompt.uid} has none. Add it, or leave `per_domain` out."
                )
            if (domain := self.domain_of(prompt)) not in self._raced_of:
                raise UsageError(
                    f"The prompt {prompt.uid} has the domain {domain!r}, to which "
                    f"`TailBatching(per_domain=...)` gives no share. Its domains are "
                    f"{sorted(map(str, self._raced_of))}: add a share, or remove the domain's "
                    "prompts."
                )
            there[domain] += 1
        for name, n in self._raced_of.items():
            if there[name] < (most := n + self.most_deferred):
                raise UsageError(
                    f"`TailBatching(per_domain=...)` may hold {most} prompts of {name!r} at once, "
                    f"{n} of them in a short round, and `train_data` has only {there[name]}. Use "
                    "a lower share, `prompts_per_round` or `prompt_ratio`."
                )

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

    def launched(self, num_generations: int) -> int:
        return at_least(self._ratio, num_generations)

    def most_prompts(self) -> int:
        return self._raced

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return sum(n for _, n in self.draws(pool))

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """The prompts that a race lacks, by domain; none before a long round."""
        if self._oldest_losers(pool):
            return []
        there = Counter(self.domain_of(group.prompt) for group in pool if not group.deferred)
        return [(domain, max(0, n - there[domain])) for domain, n in self._raced_of.items()]

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The losers of a long round, or the prompts of a race, interleaved by domain."""
        if losers := self._oldest_losers(pool):
            return losers
        seen: Counter[str | None] = Counter()
        ranked = []
        for group in pool:
            if not group.deferred:
                domain = self.domain_of(group.prompt)
                seen[domain] += 1
                ranked.append((seen[domain] / self._raced_of[domain], group))
        return [group for rank, group in sorted(ranked, key=lambda t: t[0]) if rank <= 1]

    def _oldest_losers(self, pool: Iterable[Group]) -> list[Group]:
        """The oldest losers if they fill a long round, else an empty list."""
        lost = [group for group in pool if group.deferred][: self.update_prompts]
        return lost if len(lost) == self.update_prompts else []

    def is_long(self, planned: Sequence[Group]) -> bool:
        return any(group.deferred for group in planned)

    def metrics(self, planned: Sequence[Group]) -> dict[str, float]:
        return {"tail_batching/long_round": float(self.is_long(planned))}

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """After each long round, although some losers may already wait for the next one."""
        return not left or self.is_long(planned)

    def done(self, state: RoundState) -> bool:
        winners = self._all_winners(state)
        return bool(winners) and all(group.complete for group in winners)

    def final_groups(self, state: RoundState) -> Sequence[Group]:
        final = state.decoded[: state.final]
        return self._take_places((group for group in final if not useless(group)), state)

    def enough(self, group: Group, state: RoundState) -> list[Completion] | None:
        """The first `num_generations` completions once they are scored, sorted by index."""
        winners = self._winners_of(group.id, state)
        if len(winners) < self.num_generations or not all(c.scored for c in winners):
            return None
        return sorted(winners, key=lambda c: c.index)

    def awaits(self, state: RoundState) -> bool:
        if not all(group.complete for group in self._all_winners(state)):
            return True
        racing = (g for g in state.planned if len(g.completions) > self.num_generations)
        return any(
            len(winners) == self.num_generations and not all(c.scored for c in winners)
            for winners in (self._winners_of(group.id, state) for group in racing)
        )

    def split(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Train on the winners; the losers stay, with `num_generations` completions each.

        Groups whose completions are all dropped count as trained on, so that they leave the pool.
        """
        won = {group.id for group in self._winners(state) if group.complete}
        trained, left = [], []
        for group in groups:
            if group.id in won or useless(group):
                trained.append(group)
            else:
                begun = [*group.completions, *state.stopped.get(group.id, ())]
                kept = sorted(begun, key=lambda c: c.index)[: self.num_generations]
                left.append(replace(group, completions=kept, deferred=group.deferred + 1))
        return trained, left

    def _winners(self, state: RoundState) -> list[Group]:
        """The first groups: of those decoded, or of those scored once patience is over."""
        able = (g for g in state.decoded if (state.patient or g.complete) and not useless(g))
        return self._take_places(able, state)

    def _all_winners(self, state: RoundState) -> list[Group]:
        """The winners if all places of the update are taken, else an empty list."""
        if len(state.decoded) < self.update_prompts:
            return []  # the usual case, asked in every step
        winners = self._winners(state)
        return winners if len(winners) == self.update_prompts else []

    def _take_places(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """Those of `groups` that get a place in the update: the first ones of each domain."""
        if self.is_long(state.planned):  # it has no quotas
            return list(groups)
        places, taken = dict(self.quotas), []
        for group in groups:
            domain = self.domain_of(group.prompt)
            places[domain] -= 1
            if places[domain] >= 0:
                taken.append(group)
        return taken

    def _winners_of(self, group_id: str, state: RoundState) -> list[Completion]:
        """The first completions of a group where completions race."""
        finished = state.finished.get(group_id, [])
        if not self.stops_groups or len(finished) < self.num_generations:
            return []  # the usual case, asked in every step
        able = (c for c in finished if (state.patient or c.scored) and not c.dropped)
        return list(islice(able, self.num_generations))
