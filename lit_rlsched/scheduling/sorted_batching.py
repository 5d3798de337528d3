"""SortedRL: train on completions as they finish, and load prompts a pool at a time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState, at_least
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group

Mode = Literal["on_policy", "partial"]
Unit = Literal["group", "completion"]


class SortedRound(RoundRule):
    """Ends a round as soon as the completions of an update are decoded.

    SortedRL's controller (arXiv 2603.23414, section 3). Prompts are loaded a pool at a time, once
    every prompt of the last pool was trained on. The whole pool decodes, as far as there are slots.
    The round trains on every completion that is finished when it ends, even if the last step
    finished more than an update needs. Short completions thus come first in each pool and long ones
    last, and none is delayed forever: a pool of `n` updates takes at most `n` rounds.

    What is trained on as a whole, the `unit`, is a `group`, whose completions are compared with
    each other, or a `completion`; `update_prompts * num_generations` of these are an update.
    `SortedBatching` documents the other arguments.
    """

    def __init__(
        self,
        update_prompts: int,
        pool_prompts: int,
        num_generations: int,
        unit: Unit = "group",
        mode: Mode = "on_policy",
        max_staleness: int | None = None,
        oversubscribe: float | None = None,
    ) -> None:
        self.update_prompts, self.pool_prompts = update_prompts, pool_prompts
        self.num_generations, self.unit = num_generations, unit
        self.max_staleness = max_staleness if mode == "partial" else 0
        self._raced = pool_prompts
        if oversubscribe is not None:
            self._raced = min(pool_prompts, at_least(oversubscribe, update_prompts))
        self.ends_early = update_prompts < self._raced

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return 0 if pool else self.pool_prompts

    def most_prompts(self) -> int:
        return self._raced

    def check_enough(self, prompts: int) -> None:
        super().check_enough(prompts)
        if prompts < self.pool_prompts:
            raise UsageError(
                f"`SortedBatching` loads {self.pool_prompts} prompts at a time, and "
                f"`train_data` holds {prompts}. Use fewer `pool_rounds`, or a lower "
                "`prompts_per_round`."
            )

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The first groups of the pool that together hold the completions of a round.

        A group that was partly trained on counts with its other completions only.
        """
        sizes = [len(group.completions) for group in pool]
        most, before = self._raced * self.num_generations, accumulate(sizes, initial=0)
        return [group for group, n in zip(pool, before, strict=False) if n < most]

    def done(self, state: RoundState) -> bool:
        if self.unit == "completion":
            return state.completions_decoded >= self.update_prompts * self.num_generations
        return len(state.decoded) >= self.update_prompts

    def split(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Split into finished and unfinished groups or completions, in the order of the pool."""
        trained, left = [], []
        for group in groups:
            done = [c for c in group.completions if c.finished]
            rest = [c for c in group.completions if not c.finished]
            if self.unit == "group" and rest:
                done, rest = [], group.completions
            if done:
                trained.append(replace(group, completions=done) if rest else group)
            if rest:
                left.append(replace(group, completions=rest))
        return trained, left
