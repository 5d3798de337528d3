"""In-flight updates: new weights between two turns of a rollout, and how old tokens may get."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.settings import UsageError, check_ranges
from lit_rlsched.types import Group

Pace = Literal["turns", "free"]
"""Whether rollout and trainer wait for each other at the turns at which weights change."""
Cache = Literal["recompute", "keep"]
"""What happens to keys and values of older weights."""
TooOld = Literal["wait", "verify"]
"""What happens to prompts whose tokens would get too old: rounds wait for them, or verify them."""
OWNER = "InFlightUpdates"


@dataclass(frozen=True, slots=True)
class InFlight:
    """When new weights go into a running rollout, and what becomes of its caches."""

    pace: Pace = "turns"
    cache: Cache = "recompute"
    turns: int = 32
    """Weights change at multiples of this number of turns."""
    replay: Mapping[int, Collection[int]] | None = None
    """Turns of an earlier run with `pace="free"`, by the version that a rollout began with."""
    too_old: TooOld = "wait"

    def __post_init__(self) -> None:
        check_ranges(OWNER, {"turns": self.turns})
        if self.too_old == "verify" and self.cache == "keep":
            raise UsageError(
                f"`{OWNER}(too_old='verify', cache='keep')`: with kept caches no policy has drawn "
                "the tokens that were to be verified. Use `cache='recompute'` or `too_old='wait'`."
            )
        if self.replay is None:
            return
        if self.pace != "free":
            raise UsageError(
                f"`{OWNER}(replay=..., pace={self.pace!r})`: a run with this pace repeats by "
                "itself. Leave `replay` out, or use `pace='free'`, as in the run that is replayed."
            )
        if wrong := [t for of in self.replay.values() for t in of if t % self.turns]:
            raise UsageError(
                f"`{OWNER}(replay=..., turns={self.turns})`: weights of that run changed at turn "
                f"{wrong[0]}. Use its `turns`."
            )


def capacity(max_staleness: int, update_prompts: int, updates: int) -> int:
    """Number of prompts that may have been admitted in all when an update begins.

    AReaL's rule (arXiv 2505.24298, section 5.1). If no prompt overtakes another, the prompts
    admitted now are trained on within the next `max_staleness` rounds.
    """
    return (max_staleness + updates) * update_prompts


def window_of(max_staleness: int, update_prompts: int, prompts: int) -> int:
    """Maximum number of prompts among which one that is ready may be taken first; 0: none may be.

    A prompt that is admitted has at most `prompts - 1` others before it and is overtaken by at most
    `window - 1`. Each round trains on `update_prompts` of them, so it is passed over in at most
    `(prompts + window - 2) // update_prompts` rounds, which is one less than `max_staleness`.
    """
    return max(0, max_staleness * update_prompts + 1 - prompts)


def taken(overtaken: Sequence[int], ready: Sequence[bool], most: int, window: int) -> list[int]:
    """Indices of the prompts that an update takes: the oldest ones that are ready.

    None waits while `window` later ones are taken.
    """
    found: list[int] = []
    room = window
    for index, (before, done) in enumerate(zip(overtaken, ready, strict=True)):
        if len(found) == most or room < 1:
            break
        if done:
            found.append(index)
            room -= index >= len(found)  # it overtakes those that are not ready
        else:
            room = min(room, window - 1 - before)
    return found


class WindowedRound(RoundRule):
    """Ends a round as soon as an update's prompts are ready, oldest first, within a window.

    The windowed first-in-first-out order of MiniMax's Forge and TitanRL: ready prompts may overtake
    others that still decode, but no prompt is overtaken `window` times. Prompts that are not ready
    go on in the next round.

    With `too_old="verify"` nothing waits: any ready prompt may overtake. Completions whose tokens
    would be too old at the next update begin the round as drafts.

    Args:
        update_prompts: Prompts of an update.
        prompts: Prompts that decode at the same time; by default half an update less than
            `capacity`, and with `verify` one and a half updates at least.
        max_staleness: Maximum age of a token in rounds; see `window_of`.
        steps_per_round: Optimizer steps of a round.
        too_old: What becomes of prompts with tokens that would be older.

    Raises:
        UsageError: `prompts` is less than an update or, with `wait`, more than the `capacity`.
    """

    def __init__(
        self,
        update_prompts: int,
        prompts: int | None,
        max_staleness: int,
        steps_per_round: int,
        too_old: TooOld = "wait",
    ) -> None:
        check_ranges(OWNER, {"max_staleness": max_staleness})
        verifies, most = too_old == "verify", capacity(max_staleness, update_prompts, 0)
        if prompts is None:
            usual = max(most, 2 * update_prompts) if verifies else most
            prompts = max(update_prompts, usual - update_prompts // 2)
        if prompts < update_prompts or (prompts > most and not verifies):
            upwards = "or more" if verifies else f"to {most}, or a larger `max_staleness`"
            raise UsageError(
                f"`{OWNER}(prompts_in_flight={prompts}, {max_staleness=})`: with an update of "
                f"{update_prompts} prompts use {update_prompts} {upwards}."
            )
        self.update_prompts, self.prompts = update_prompts, prompts
        self.window = window_of(max_staleness, update_prompts, prompts)
        self.max_staleness = max_staleness * steps_per_round
        if verifies:
            self.window = sys.maxsize
            self.verifies_from = (max_staleness - 1) * steps_per_round + 1
        self.ends_early = prompts > update_prompts

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return max(0, self.prompts - len(pool))

    def most_prompts(self) -> int:
        return self.prompts

    def check_enough(self, prompts: int) -> None:
        super().check_enough(prompts)
        if prompts < self.prompts:
            raise UsageError(
                f"`{OWNER}` decodes {self.prompts} prompts at the same time, and `train_data` "
                f"holds {prompts}. Use a lower `prompts_in_flight` or `prompts_per_round`."
            )

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        return pool[: self.prompts]

    def done(self, state: RoundState) -> bool:
        if len(state.decoded) < self.update_prompts:
            return False
        decoded = {group.id for group in state.decoded}
        return len(self._taken(state.planned, decoded)) == self.update_prompts

    def final_groups(self, state: RoundState) -> Sequence[Group]:
        return []

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Take an update's prompts, and count by how many each of the others was overtaken."""
        ready = {g.id for g in groups if all(c.finished for c in g.completions)}
        chosen = self._taken(groups, ready)
        trained, left, rest = [], [], len(chosen)
        for index, group in enumerate(groups):
            if index in chosen:
                trained.append(group)
                rest -= 1
            else:
                left.append(replace(group, overtaken=group.overtaken + rest))
        return trained, left

    def _taken(self, groups: Sequence[Group], ready: Collection[str]) -> list[int]:
        overtaken, done = [g.overtaken for g in groups], [g.id in ready for g in groups]
        return taken(overtaken, done, self.update_prompts, self.window)
