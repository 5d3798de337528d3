"""Races: rounds that begin more than they train on, and train on what is ready first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from lit_rlsched.scheduling.domains import check_domains, domain_of, quotas
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState, at_least
from lit_rlsched.types import Completion, Group, Prompt

Race = Literal["prompt", "completion"]
Reuse = Literal["drafts"]

PATIENCE = 5.0
"""Seconds of a round for which a race waits for scores before others may overtake."""


class RacingRound(RoundRule):
    """The race of a round: who is ahead, when it is over, what becomes of those who lost.

    Prompts are ahead in the order in which their last completion is decoded. The round is over once
    those that are ahead, an update's worth, are scored; while `patience` lasts others do not
    overtake them, however late their scores come. The others stay in the pool. With
    `race="completion"` the completions of a prompt race in the same way: the first
    `num_generations` of more are kept.

    With `shares` each domain races for itself: it has a quota of each update, and more prompts than
    that are begun of it.

    Args:
        update_prompts: Prompts of an update.
        num_generations: Completions of a prompt that are trained on.
        prompt_ratio: Prompts of a race, as a multiple of `update_prompts`.
        completion_ratio: Completions of a fresh prompt that are begun, as a multiple of
            `num_generations`, if single completions race.
        race: Whether only prompts race, each with all its completions, or also the completions of
            a prompt.
        patience: See `RoundRule`.
        reuse: Whether what losers had drawn is kept for a later round to verify.
        shares: Of each domain in an update; they add up to 1. By default prompts of all domains
            race together.

    Raises:
        ValueError: A domain has no prompt in an update.
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
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.update_prompts = update_prompts
        self.num_generations = num_generations
        self.patience = patience
        self.keeps_drafts = reuse == "drafts"
        self.shares = shares
        self.quotas = quotas(shares, update_prompts)
        self._ratio = completion_ratio if race == "completion" else 1.0
        self._begun = self.launched(num_generations)
        self.stops_groups = self._begun > num_generations
        self._raced_of = {domain: at_least(prompt_ratio, n) for domain, n in self.quotas.items()}
        self._raced = sum(self._raced_of.values())
        self.ends_early = self._raced > update_prompts
        # those that lost, until they fill a round of their own
        self.most_deferred = update_prompts - 1 if self.ends_early else 0

    def domain_of(self, prompt: Prompt) -> str | None:
        """Its column `domain`, where domains race for themselves."""
        return None if self.shares is None else domain_of(prompt)

    def check_domains(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a domain or of another, and domains with too few prompts."""
        if self.shares is not None:
            check_domains(prompts, self._raced_of, self.most_deferred)

    def launched(self, num_generations: int) -> int:
        """More than are trained on, where they race."""
        return at_least(self._ratio, num_generations)

    def most_prompts(self) -> int:
        """Those of a race."""
        return self._raced

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
        return self._first((group for group in final if not useless(group)), state)

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
        """Trained on: the groups that were ready first, as many as an update has.

        Groups whose completions are all dropped go with them, so that they leave the pool.
        The others stay in the pool, with as many completions as are trained on.
        """
        won = {group.id for group in self._ahead(state) if group.complete}
        trained, left = [], []
        for group in groups:
            if group.id in won or useless(group):
                trained.append(group)
            else:
                begun = [*group.completions, *state.stopped.get(group.id, ())]
                kept = sorted(begun, key=lambda c: c.index)[: self.num_generations]
                left.append(replace(group, completions=kept, deferred=group.deferred + 1))
        return trained, left

    def _ahead(self, state: RoundState) -> list[Group]:
        """An update's worth of what is decoded, or, once patience is over, of what is scored."""
        decoded = state.decoded
        able = (g for g in decoded if (state.patient or g.complete) and not useless(g))
        return self._first(able, state)

    def _enough_ahead(self, state: RoundState) -> list[Group]:
        """What is ahead, where it is an update's worth; else nothing."""
        if len(state.decoded) < self.update_prompts:
            return []  # asked in every step
        ahead = self._ahead(state)
        return ahead if len(ahead) == self.update_prompts else []

    def _first(self, groups: Iterable[Group], state: RoundState) -> list[Group]:
        """The first, as many as an update has of each domain."""
        left = dict(self.quotas)
        return [group for group in groups if self._takes_place(group, left)]

    def _takes_place(self, group: Group, left: dict[str | None, int]) -> bool:
        """Whether its domain has a place `left`, which it then takes."""
        domain = self.domain_of(group.prompt)
        left[domain] -= 1
        return left[domain] >= 0

    def _ahead_of(self, group_id: str, state: RoundState) -> list[Completion]:
        """Of a group's completions those that are ahead, where they race."""
        if self._begun == self.num_generations:
            return []
        finished = state.finished.get(group_id, [])
        if len(finished) < self.num_generations:
            return []  # asked in every step
        able = (c for c in finished if (state.patient or c.scored) and not c.dropped)
        return list(islice(able, self.num_generations))


def useless(group: Group) -> bool:
    """Whether nothing of it can be trained on: it was filtered, or every completion is bad."""
    return group.complete and all(c.dropped for c in group.completions)
