"""Racing rounds: start more prompts than an update needs, and train on the first ones ready."""

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


def domain_of(prompt: Prompt) -> str:
    return str(prompt.columns[COLUMN])


def check_domains(prompts: Sequence[Prompt], raced: Mapping[str | None, int], waiting: int) -> None:
    """Refuse prompts without a domain or of an unknown one, and domains with too few prompts."""
    there: Counter[str] = Counter()
    for prompt in prompts:
        if COLUMN not in prompt.columns:
            raise UsageError(
                f"`TailBatching(per_domain=...)` needs a column `{COLUMN}` in `train_data`, "
                f"and the prompt {prompt.uid} has none. Add it, or leave `per_domain` out."
            )
        if (domain := domain_of(prompt)) not in raced:
            raise UsageError(
                f"The prompt {prompt.uid} has the domain {domain!r}, to which "
                f"`TailBatching(per_domain=...)` gives no share. Its domains are "
                f"{sorted(map(str, raced))}: add a share, or remove the domain's prompts."
            )
        there[domain] += 1
    for name, n in raced.items():
        if there[str(name)] < (most := n + waiting):
            raise UsageError(
                f"`TailBatching(per_domain=...)` may hold {most} prompts of {name!r} at once, "
                f"{n} of them in a short round, and `train_data` has only {there[str(name)]}. Use "
                "a lower share, `prompts_per_round` or `prompt_ratio`."
            )


PATIENCE = 5.0
"""Longest time per round, in seconds, to wait for scores before others may overtake."""


class RacingRound(RoundRule):
    """A race between the prompts of a round for the places of an update.

    Prompts rank in the order in which their last completion is decoded. The first
    `update_prompts` of them win, and the round ends once these are scored. While `patience` lasts,
    no other prompt overtakes them, however late their scores come. The losers stay in the pool.
    With a `completion_ratio` above 1 the completions of a prompt race in the same way: more than
    `num_generations` start, and the first of them are kept.

    With `shares` each domain has its own race: a quota of each update, and more prompts than that
    in the round.

    Args:
        update_prompts: Prompts of an update.
        num_generations: Completions per prompt that are trained on.
        prompt_ratio: Prompts of a race, as a multiple of `update_prompts`.
        completion_ratio: Completions to start for a fresh prompt, as a multiple of
            `num_generations`; with 1 the completions of a prompt do not race.
        patience: See `RoundRule`.
        shares: Share of each domain in an update; they add up to 1. By default prompts of all
            domains race together.

    Raises:
        UsageError: A domain has no prompt in an update.
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
        self.update_prompts = update_prompts
        self.num_generations = num_generations
        self.patience = patience
        self.shares = shares
        self.quotas = quotas(shares, update_prompts)
        self._ratio = completion_ratio
        self.stops_groups = self.launched(num_generations) > num_generations
        self._raced_of = {domain: at_least(prompt_ratio, n) for domain, n in self.quotas.items()}
        self._raced = sum(self._raced_of.values())
        self.ends_early = self._raced > update_prompts
        # losers wait until they fill a round of their own
        self.most_deferred = update_prompts - 1 if self.ends_early else 0

    @property
    def has_domains(self) -> bool:
        return self.shares is not None

    def domain_of(self, prompt: Prompt) -> str | None:
        return None if self.shares is None else domain_of(prompt)

    def check_domains(self, prompts: Sequence[Prompt]) -> None:
        if self.shares is not None:
            check_domains(prompts, self._raced_of, self.most_deferred)

    def launched(self, num_generations: int) -> int:
        return at_least(self._ratio, num_generations)

    def most_prompts(self) -> int:
        return self._raced

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

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
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
        places = dict(self.quotas)
        return [group for group in groups if self._takes_place(group, places)]

    def _takes_place(self, group: Group, places: dict[str | None, int]) -> bool:
        """Take a place of the group's domain; false if none is left."""
        domain = self.domain_of(group.prompt)
        places[domain] -= 1
        return places[domain] >= 0

    def _winners_of(self, group_id: str, state: RoundState) -> list[Completion]:
        """The first completions of a group where completions race."""
        finished = state.finished.get(group_id, [])
        if not self.stops_groups or len(finished) < self.num_generations:
            return []  # the usual case, asked in every step
        able = (c for c in finished if (state.patient or c.scored) and not c.dropped)
        return list(islice(able, self.num_generations))


def useless(group: Group) -> bool:
    """Whether nothing of a group can be trained on: all its completions are scored and dropped."""
    return group.complete and all(c.dropped for c in group.completions)
