"""Schedules of other packages, for the same simulation: what they do with completions, by name.

Each is the rule alone. Kernels, weight transfer and scores are those of the simulation, so that a
difference between two rows is one between two rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule, RoundState, at_least
from lit_rlsched.training.schedule import Schedule
from lit_rlsched.types import Group


class FirstReadyRound(RoundRule):
    """Starts more prompts than an update needs, and takes the groups that are complete first.

    Args:
        update_prompts: Prompts of an update.
        prompts: Prompts in flight when a round begins.
        keeps: Which of the others keep their tokens and go on in the next round, before new
            prompts: `all`, those that are `unfinished`, as in slime, or `nothing`.
        most_age: Updates after which a group is dropped when its turn comes. With it the round
            lasts at least as long as the update beside it, and prompts that are complete are not
            in flight. `None`: any number.
    """

    ends_early = True

    def __init__(
        self, update_prompts: int, prompts: int, keeps: str = "all", most_age: int | None = None
    ) -> None:
        self.update_prompts, self._prompts, self._keeps = update_prompts, prompts, keeps
        self.max_staleness = 0 if keeps == "nothing" else None
        self.most_age = most_age
        self.updating: Callable[[], bool] = lambda: False
        """Whether the update goes on; set by the simulation."""

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        in_flight = [g for g in pool if self.most_age is None or not g.complete]
        return max(0, self._prompts - len(in_flight))

    def most_prompts(self) -> int:
        return self._prompts

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        return pool

    def done(self, state: RoundState) -> bool:
        return not self.updating() and len(self._taken(state)) == self.update_prompts

    def _taken(self, state: RoundState) -> list[Group]:
        most = self.most_age
        fresh = [group for group in state.decoded if most is None or group.deferred < most]
        return fresh[: self.update_prompts]

    def split(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Count the updates of groups that stay, as `deferred`."""
        complete, taken = [group.id for group in state.decoded], self._taken(state)
        passed = complete[: complete.index(taken[-1].id) + 1]
        gone = {"all": passed, "unfinished": complete, "nothing": [*state.place]}[self._keeps]
        left = [replace(group, deferred=group.deferred + 1) for group in groups]
        return taken, [group for group in left if group.id not in gone]


@dataclass(frozen=True, slots=True)
class Peer:
    """A schedule of others."""

    name: str
    source: str
    """Where it is from; `docs/howto/simulate.md` says what it does."""
    rule: Callable[[int], RoundRule]
    """Given the prompts of an update."""
    ahead: bool = False
    """Whether the next round is drawn during the update."""
    keeps_cache: bool = False
    """Whether what goes on in the next round keeps its cache though the weights are new."""

    def schedule(self, update_prompts: int) -> Schedule:
        """Return the schedule for an update of this many prompts."""
        return Schedule(self.rule(update_prompts), ahead=self.ahead)


OVERSAMPLING = 1.5
STALENESS = 1
"""Maximum age, in updates, of AReaL's and prime-rl's rules here."""

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("fcfs_all", "TRL `GRPOTrainer`, verl", FullRound),
        Peer(
            "oversample_abort",
            "slime `--over-sampling-batch-size`, ROLL `max_additional_running_prompts`",
            lambda n: FirstReadyRound(n, at_least(OVERSAMPLING, n), keeps="nothing"),
        ),
        Peer(
            "oversample_partial",
            "APRIL (arXiv 2509.18521), slime `--partial-rollout`",
            lambda n: FirstReadyRound(n, at_least(OVERSAMPLING, n), keeps="unfinished"),
        ),
        Peer(
            "group_fifo",
            "AReaL (arXiv 2505.24298, equation 3), prime-rl, SkyRL's fully asynchronous trainer",
            lambda n: FirstReadyRound(n, (STALENESS + 1) * n),
            ahead=True,
        ),
        Peer(
            "discard_stale",
            "TRL 1.16 `AsyncGRPOTrainer`, whose default is `max_staleness=4`",
            lambda n: FirstReadyRound(n, 4 * n, most_age=4),
            ahead=True,
        ),
        Peer("one_step_off", "verl's one-step-off-policy recipe", FullRound, ahead=True),
        Peer(
            "windowed_fifo",
            "MiniMax Forge, TitanRL",
            lambda n: WindowRound(n, 2 * n - n // 2, n // 2, 2, None),
            ahead=True,
        ),
        Peer(
            "in_flight",
            "PipelineRL (arXiv 2509.19128)",
            lambda n: FirstReadyRound(n, (STALENESS + 1) * n),
            ahead=True,
            keeps_cache=True,
        ),
    )
}
