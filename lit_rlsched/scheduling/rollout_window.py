"""A window of prompts in flight: which of them a round trains on, what becomes of the others."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group

TooOld = Literal["wait", "verify"]
"""What happens to prompts whose tokens would get too old: rounds wait for them, or verify them."""


def most_overtakes(max_staleness: int, update_prompts: int, prompts: int) -> int:
    """How many later prompts may be trained on before a prompt, so that it never gets too old.

    A prompt that is begun has at most `prompts - 1` others before it. Each round trains on
    `update_prompts`, so with `n` overtakes it is passed over in at most
    `(prompts + n - 1) // update_prompts` rounds, which is one less than `max_staleness`.
    """
    return max(0, max_staleness * update_prompts - prompts)


def places(
    decoded: Iterable[int], overtaken: Sequence[int], update_prompts: int, overtakes: int
) -> list[int]:
    """Give the places of an update to the oldest of the decoded prompts.

    A prompt gets no place if an earlier one would then have been overtaken too often: those that
    must not be overtaken once more have a place of this update reserved.

    Prompts are numbered as they were drawn from the data. Earlier rounds have trained on
    `overtaken` later prompts before each; no prompt has a larger number than one before it. At most
    `overtakes` are allowed.
    """
    placed: list[int] = []

    def may_be_left(number: int) -> bool:
        later = len(placed) - bisect_right(placed, number)
        return min(overtaken[number], overtakes) + later <= overtakes

    for number in sorted(decoded)[:update_prompts]:
        placed.append(number)
        reserved = bisect_left(range(len(overtaken)), True, key=may_be_left)  # the first prompts
        if len(placed) + reserved - bisect_left(placed, reserved) > update_prompts:
            placed.pop()
            break  # a later one would need all that this one needs
    return placed


class WindowRound(RoundRule):
    """Trains on the prompts of a window that are ready, and lets the others go on.

    `prompts` prompts are in flight, in the order of the data. A round ends as soon as an update's
    worth of them is ready. At most `overtakes` later prompts are trained on before a prompt. Every
    prompt that was begun is trained on, and its completions keep the tokens that they have.

    With `overtakes=0` a round trains on the oldest prompts, which are known before it begins. The
    others are `waiting`: they use free slots, and nothing that they say has an effect.

    Tokens of earlier policies are verified when a round begins, if they are `verifies_from` policy
    versions old. By default that is all of them.

    If more prompts are ready than a round takes, it takes the oldest of them, those that were drawn
    from the data first. With `fewer`, `prompts` is only the most, for a data set that holds fewer.
    """

    def __init__(
        self,
        update_prompts: int,
        prompts: int,
        overtakes: int,
        max_staleness: int = 0,
        verifies_from: int | None = 1,
        fewer: bool = False,
    ) -> None:
        self.update_prompts, self.prompts, self.overtakes = update_prompts, prompts, overtakes
        self.max_staleness, self.verifies_from = max_staleness, verifies_from
        self._fewer = fewer
        self.ends_early = self.reorders = overtakes > 0 and prompts > update_prompts

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return max(0, self.prompts - len(pool))

    def reach(self, rounds: int) -> int:
        """With `overtakes=0`, what these rounds train on; else any prompt may be in time."""
        return self.prompts if self.reorders else rounds * self.update_prompts

    def most_prompts(self) -> int:
        return self.prompts

    def slot_prompts(self) -> int:
        """Those of a plain round: what is in flight beyond waits for a slot."""
        return self.update_prompts

    def check_enough(self, prompts: int) -> None:
        """Hold what the data set holds, or refuse it."""
        super().check_enough(prompts)
        if self._fewer:
            self.prompts = min(self.prompts, prompts)
        if prompts < self.prompts:
            raise UsageError(
                f"`prompts_in_flight={self.prompts}` is more than `train_data` holds: {prompts} "
                f"prompts. Use {prompts} or fewer, or leave it out."
            )

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        return pool[: self.prompts]

    def waiting(self, planned: Sequence[Group]) -> Sequence[Group]:
        return () if self.reorders else planned[self.update_prompts :]

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """After each round, since there are always prompts left."""
        return True

    def done(self, state: RoundState) -> bool:
        size = self.update_prompts
        if not self.reorders:
            size = len(state.planned) - len(state.waiting)  # with prompts that replace others
        return len(state.decoded) >= size and len(self._placed(state)) == size

    def final_groups(self, state: RoundState) -> Sequence[Group]:
        """The oldest `update_prompts`, once decoded: nothing that still decodes pushes them out."""
        later = {group.id for group in state.planned[self.update_prompts :]}
        without = later if self.reorders else state.waiting
        return [group for group in state.decoded[: state.final] if group.id not in without]

    def split(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Take an update's prompts, and count by how many each of the others was overtaken."""
        chosen = {group.id for group in self._placed(state)}
        trained, left, later = [], [], len(chosen)
        for group in groups:
            if group.id in chosen:
                trained.append(group)
                later -= 1
            else:
                overtaken = group.overtaken + (later if self.reorders else 0)
                left.append(replace(group, overtaken=overtaken))
        return trained, left

    def _placed(self, state: RoundState) -> list[Group]:
        """Those of the decoded groups that this round trains on."""
        if not self.reorders:
            return [group for group in state.decoded if group.id not in state.waiting]
        planned = state.planned
        number = {group.id: i for i, group in enumerate(planned)}
        decoded = [number[group.id] for group in state.decoded]
        overtaken = [group.overtaken for group in planned]
        chosen = places(decoded, overtaken, self.update_prompts, self.overtakes)
        return [planned[i] for i in chosen]
