"""Tail batching: rounds that do not wait for the longest completions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState, at_least
from lit_rlsched.types import Completion, Group

Race = Literal["prompt", "completion"]
Reuse = Literal["drafts"]

PATIENCE = 5.0
"""Seconds of a round for which a race waits for scores before others may overtake."""


class TailRound(RoundRule):
    """Short rounds race more prompts than they train on, long rounds run those that lost.

    RollPacker's tail batching (arXiv 2509.21009, section 3). A round is long if the pool holds
    enough prompts that lost a race: the oldest of them are then run to their end, nothing beside
    them. Any other is short: it takes fresh prompts only, more than it needs, and is over once
    `update_prompts` of them are scored. The losers' tokens are thrown away, or kept as drafts.

    With `max_deferrals` what lost races again, beside as many fresh prompts as are lacking. A round
    is then long if one of them has lost so often: it does not end before all that waited are
    scored.

    Args:
        update_prompts: Prompts of an update.
        num_generations: Completions of a prompt that are trained on.
        prompt_ratio: Prompts of a race, as a multiple of `update_prompts`.
        completion_ratio: Completions of a fresh prompt that are begun, as a multiple of
            `num_generations`, if single completions race.
        race: Whether only prompts race, each with all its completions, or also the completions of
            a prompt, of which the first `num_generations` are kept.
        patience: See `RoundRule`.
        reuse: Whether what losers had drawn is kept for a later round to verify.
        max_deferrals: Races that a prompt may lose; `None`: one, then it waits for a long round.
            No round waits for more prompts than an update has: where `prompt_ratio` is above 2,
            one may lose some more.
    """

    def __init__(
        self,
        update_prompts: int,
        num_generations: int,
        prompt_ratio: float = 1.25,
        completion_ratio: float = 1.25,
        race: Race = "prompt",
        patience: float = PATIENCE,
        reuse: Reuse | None = None,
        max_deferrals: int | None = None,
    ) -> None:
        self.update_prompts = update_prompts
        self.num_generations = num_generations
        self.patience = patience
        self.keeps_drafts = reuse == "drafts"
        self.max_deferrals = max_deferrals
        self._ratio = completion_ratio if race == "completion" else 1.0
        self._begun = self.launched(num_generations)
        self.stops_groups = self._begun > num_generations
        self._set_quotas({None: update_prompts}, prompt_ratio)

    def _set_quotas(self, quotas: Mapping[str | None, int], prompt_ratio: float) -> None:
        """How many prompts of each domain win, and how many race."""
        self.quotas = dict(quotas)
        self._raced_of = {domain: at_least(prompt_ratio, n) for domain, n in quotas.items()}
        self._raced = sum(self._raced_of.values())
        self.ends_early = self._raced > self.update_prompts
        waits = self.ends_early and self.max_deferrals is None
        self.most_deferred = self.update_prompts - 1 if waits else 0

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        """Those that a race lacks; none before a round of what lost."""
        return sum(n for _, n in self.draws(pool))

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """The same by domain."""
        if self._waiting(pool):
            return []
        there = Counter(self.domain_of(group.prompt) for group in self._racing(pool))
        return [(domain, max(0, n - there[domain])) for domain, n in self._raced_of.items()]

    def launched(self, num_generations: int) -> int:
        """More than are trained on, where they race."""
        return at_least(self._ratio, num_generations)

    def most_prompts(self) -> int:
        """Those of a race."""
        return self._raced

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
        """After a round of what lost, more or less: some may wait for the next one.

        Where losers race again what waits is never used up: each round is a cycle.
        """
        return not left or self.max_deferrals is not None or self.is_long(planned)

    def done(self, state: RoundState) -> bool:
        """When an update's worth is scored, and can be trained on."""
        ahead = self._enough_ahead(state)
        return bool(ahead) and all(group.complete for group in ahead)

    def discards(self, state: RoundState) -> bool:
        """Where there is a race."""
        return len(state.planned) > self.update_prompts

    def final_groups(self, state: RoundState) -> Sequence[Group]:
        """An update's worth of those that were decoded first."""
        final = state.decoded[: state.final]
        return self._first((group for group in final if not _useless(group)), state)

    def enough(self, group: Group, state: RoundState) -> list[Completion] | None:
        """The first that are scored, as many as are trained on, where they race."""
        ahead = self._ahead_of(group.id, state)
        if len(ahead) < self.num_generations or not all(c.scored for c in ahead):
            return None
        return sorted(ahead, key=lambda c: c.index)

    def awaits(self, state: RoundState) -> bool:
        """Where those that are ahead are not scored."""
        if not all(group.complete for group in self._enough_ahead(state)):
            return True
        races = (g for g in state.planned if len(g.completions) > self.num_generations)
        return any(
            len(ahead) == self.num_generations and not all(c.scored for c in ahead)
            for ahead in (self._ahead_of(group.id, state) for group in races)
        )

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """An update's worth of those that were ready first, and what nothing can be trained on of.

        The others stay in the pool, with as many completions as are trained on.
        """
        won = {group.id for group in self._ahead(state) if group.complete}
        trained, left = [], []
        for group in groups:
            if group.id in won or _useless(group):
                trained.append(group)
            else:
                begun = [*group.completions, *state.stopped.get(group.id, ())]
                kept = sorted(begun, key=lambda c: c.index)[: self.num_generations]
                left.append(replace(group, completions=kept, deferred=group.deferred + 1))
        return trained, left

    def _racing(self, pool: Iterable[Group]) -> list[Group]:
        """What goes into a race."""
        return [g for g in pool if self.max_deferrals is not None or not g.deferred]

    def _waiting(self, pool: Iterable[Group]) -> list[Group]:
        """An update's worth of what waits for a long round, if there is one."""
        if self.max_deferrals is not None:
            return []
        lost = [group for group in pool if group.deferred][: self.update_prompts]
        return lost if len(lost) == self.update_prompts else []

    def _due(self, planned: Iterable[Group]) -> list[Group]:
        """What may not lose once more: all that has lost, where one has too often."""
        lost = [group for group in planned if group.deferred]
        most = max((group.deferred for group in lost), default=0)
        return lost if most >= (self.max_deferrals or 1) else []

    def _ahead(self, state: RoundState) -> list[Group]:
        """An update's worth of what is decoded, or, once patience is over, of what is scored."""
        decoded = state.decoded
        able = (g for g in decoded if (state.patient or g.complete) and not _useless(g))
        return self._first(able, state)

    def _enough_ahead(self, state: RoundState) -> list[Group]:
        """The same where they are an update's worth, else nothing."""
        if len(state.decoded) < self.update_prompts:
            return []  # asked in every step
        ahead = self._ahead(state)
        return ahead if len(ahead) == self.update_prompts else []

    def _first(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """Those that may not lose, and the first others, as many as an update has of each domain.

        In a round of what waited alone, whatever their domain.
        """
        due = self._due(state.planned)
        if due and self.max_deferrals is None:
            return list(islice(groups, self.update_prompts))
        left = dict(self.quotas)

        def has_place(group: Group) -> bool:
            domain = self.domain_of(group.prompt)
            left[domain] -= 1
            return left[domain] >= 0

        reserved = {group.id for group in due if not _useless(group) and has_place(group)}
        return [group for group in groups if group.id in reserved or has_place(group)]

    def _ahead_of(self, group_id: str, state: RoundState) -> list[Completion]:
        """The same of a group's completions, where they race."""
        if self._begun == self.num_generations:
            return []
        finished = state.finished.get(group_id, [])
        if len(finished) < self.num_generations:
            return []  # asked in every step
        able = (c for c in finished if (state.patient or c.scored) and not c.dropped)
        return list(islice(able, self.num_generations))


def _useless(group: Group) -> bool:
    """Whether nothing of it can be trained on: it was filtered, or every completion is bad."""
    return group.complete and all(c.dropped for c in group.completions)
