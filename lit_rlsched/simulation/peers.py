"""Schedules of other packages, for the same simulation: what they do with completions, by name.

Each is the rule alone. Kernels, weight transfer and scores are those of the simulation, so that a
difference between two rows is one between two rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lit_rlsched.scheduling.admission import SlotSettings
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule, RoundState, at_least
from lit_rlsched.training.schedule import Schedule
from lit_rlsched.types import Group

Kept = Literal["all", "unfinished", "nothing"]


class FirstReadyRound(RoundRule):
    """Starts more prompts than an update needs, and takes the groups that are complete first.

    Args:
        update_prompts: Prompts of an update.
        prompts: Prompts that a round decodes.
        keeps: Which of the others keep their tokens and go on in the next round, before new
            prompts: all of them, or those that are not complete, as in slime. Others are dropped.
    """

    ends_early = True

    def __init__(self, update_prompts: int, prompts: int, keeps: Kept = "all") -> None:
        self.update_prompts, self._prompts, self._keeps = update_prompts, prompts, keeps
        self.max_staleness = 0 if keeps == "nothing" else None

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return max(0, self._prompts - len(pool))

    def most_prompts(self) -> int:
        return self._prompts

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        return pool[: self._prompts]

    def done(self, state: RoundState) -> bool:
        return len(state.decoded) >= self.update_prompts

    def split(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        complete = {group.id for group in state.decoded}
        chosen = {group.id for group in state.decoded[: self.update_prompts]}
        gone = {"all": chosen, "unfinished": complete, "nothing": {group.id for group in groups}}
        left = [group for group in groups if group.id not in gone[self._keeps]]
        return [group for group in groups if group.id in chosen], left


@dataclass(frozen=True, slots=True)
class Peer:
    """A schedule of others."""

    name: str
    source: str
    """Where it is from."""
    rule: Callable[[int], RoundRule]
    """Given the prompts of an update."""
    ahead: bool = False
    """Whether the next round is drawn during the update."""
    keeps_cache: bool = False
    """Whether what goes on in the next round keeps its cache though the weights are new."""
    exact_lengths: bool = False
    """Whether it knows lengths in advance, which nobody does: a bound."""

    def schedule(self, update_prompts: int) -> Schedule:
        """Return the schedule for an update of this many prompts."""
        schedule = Schedule(self.rule(update_prompts), ahead=self.ahead)
        if self.exact_lengths:
            schedule.slots = SlotSettings(order="longest_first")
            schedule.lengths = CalibratedPredictor(Oracle({"": 1}))
        return schedule


OVERSAMPLING = 1.5
STALENESS = 1
"""Maximum age, in updates, of AReaL's and prime-rl's rules here."""

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "fcfs_all",
            "TRL `GRPOTrainer`, verl's synchronous trainer: all completions, then the update",
            FullRound,
        ),
        Peer(
            "oversample_abort",
            "slime `--over-sampling-batch-size` without `--partial-rollout`, ROLL "
            "`max_additional_running_prompts`: 1.5 times the prompts, the slowest are dropped",
            lambda n: FirstReadyRound(n, at_least(OVERSAMPLING, n), keeps="nothing"),
        ),
        Peer(
            "oversample_partial",
            "APRIL (arXiv 2509.18521), slime `--partial-rollout`: the slowest go on first in the "
            "next round",
            lambda n: FirstReadyRound(n, at_least(OVERSAMPLING, n), keeps="unfinished"),
        ),
        Peer(
            "group_fifo",
            "AReaL (arXiv 2505.24298, equation 3), prime-rl: prompts in flight up to the staleness "
            "bound, the update takes the first groups that are complete; prefixes are computed "
            "again under new weights",
            lambda n: FirstReadyRound(n, (STALENESS + 1) * n),
            ahead=True,
        ),
        Peer(
            "one_step_off",
            "verl's one-step-off-policy recipe: the next batch is drawn during the update",
            FullRound,
            ahead=True,
        ),
        Peer(
            "windowed_fifo",
            "MiniMax Forge, TitanRL: ready prompts may overtake others within a window",
            lambda n: WindowRound(n, 2 * n - n // 2, n // 2, 2, None),
            ahead=True,
        ),
        Peer(
            "in_flight",
            "PipelineRL (arXiv 2509.19128): weights change in flight, caches are kept",
            lambda n: FirstReadyRound(n, (STALENESS + 1) * n),
            ahead=True,
            keeps_cache=True,
        ),
        Peer(
            "oracle_lpt",
            "Graham's longest processing time first, with lengths known in advance: a bound",
            FullRound,
            exact_lengths=True,
        ),
    )
}
