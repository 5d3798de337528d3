"""The loop that draws rounds, shared by `fit` and simulations."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rlsched.rollout.audit import DraftAudit, Harvest, PoolAudit, restart_stale, settle
from lit_rlsched.rollout.controller import EarlyStop, Feedback
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Group, Prompt, Sample

Verify = Callable[[Sequence[Group], int], DraftAudit]
"""Turns drafts of the groups into completions of the given policy version."""


def no_drafts(groups: Sequence[Group], version: int) -> DraftAudit:
    """Verify nothing: for rounds that begin without drafts."""
    return DraftAudit()


@dataclass(frozen=True, slots=True)
class Watchers:
    """Hooks of the trainer into a round; by default none."""

    verify: Verify = no_drafts
    """Called with groups before they are submitted."""
    stop: EarlyStop | None = None
    """Stops groups that need no more completions."""
    is_replaced: Callable[[Group], bool] | None = None
    """Returns whether another prompt takes the place of a complete group."""
    max_num_gen_batches: int = 1
    """Bound on the prompts of a round, replacements included, as a multiple of an update's."""
    advanced: Callable[[RoundState, RolloutTrace], None] = lambda state, trace: None
    """Called each time a group completes."""


Prepare = Callable[[list[Group]], Watchers]
"""Called with the groups of a round before anything is drawn; returns the round's hooks."""


@dataclass(slots=True)
class DrawnRound:
    """A drawn and scored round, whose prompts stay in the pool until `commit`."""

    number: int
    """Number of rounds before this one."""
    version: int
    """Policy version it was drawn under."""
    rule: RoundRule
    planned: list[Group]
    """All groups of the round; replacements come last."""
    begun: dict[str, int]
    """Tokens that each completion had before the round, by request id."""
    harvest: Harvest
    trace: RolloutTrace
    metrics: dict[str, float] = field(default_factory=dict)


class RoundRunner:
    """Draws rounds in two phases, so that an interrupted round can be drawn again.

    `run` draws and scores a round. It may add fresh prompts to the pool, but neither removes nor
    changes any. `commit` then removes what is trained on. A round that is interrupted before
    `commit` is drawn again as a whole.

    Args:
        planner: Chooses the prompts of each round.
    """

    def __init__(self, planner: RoundPlanner) -> None:
        self.planner = planner
        self.audit = PoolAudit()
        self.runs = 0
        """Number of Trainers before this one."""

    @property
    def salt(self) -> str:
        """Part of every seed, so that a second Trainer draws other noise."""
        return f"run {self.runs}" if self.runs else ""

    def run(
        self,
        session: RolloutSession,
        rule: RoundRule,
        number: int,
        version: int,
        prepare: Prepare = lambda groups: Watchers(),
    ) -> DrawnRound:
        """Draw and score a round.

        Args:
            session: Decodes and scores.
            rule: Decides which prompts the round takes, when it ends, and what becomes of the rest.
            number: Number of rounds before this one.
            version: Policy version of the weights.
            prepare: Called with the planned groups; returns the round's hooks.
        """
        began = time.perf_counter()
        groups = self.planner.plan(rule)
        stale = restart_stale(groups, version, rule)
        watch = prepare(groups)
        drafts, verifying = DraftAudit(), 0.0

        def verify(begins: Sequence[Group]) -> None:
            nonlocal drafts, verifying
            verified = time.perf_counter()
            drafts += watch.verify(begins, version)
            verifying += time.perf_counter() - verified

        verify(groups)
        begun = {Sample(g, c).id: len(c.token_ids) for g in groups for c in g.completions}

        def another(group: Group) -> Group | None:
            assert watch.is_replaced is not None
            if not watch.is_replaced(group) or len(groups) >= most:
                return None
            drawn = self.planner.replacement(group, groups, rule)
            if drawn is not None:
                groups.append(drawn)
                stale.extend(restart_stale([drawn], version, rule))
                verify([drawn])
            return drawn

        most = watch.max_num_gen_batches * rule.update_prompts
        feedback = Feedback(watch.stop, another if watch.is_replaced else None)
        for _ in session.rollout(groups, version, rule, self.salt, predict=True, feedback=feedback):
            watch.advanced(session.controller.state, session.trace)
        learned = session.controller.end_predictions()
        harvest = settle(groups, rule, session.controller.state, stale)
        harvest.drafts = drafts
        drawn = DrawnRound(number, version, rule, groups, begun, harvest, session.trace)
        drawn.metrics |= learned | session.metrics()
        if drafts.tokens:
            drawn.metrics["time/drafts"] = verifying
        if watch.is_replaced:
            batches = len(groups) / rule.update_prompts
            drawn.metrics["dynamic_sampling/num_gen_batches"] = batches
        drawn.metrics["time/rollout"] = time.perf_counter() - began
        return drawn

    def commit(self, drawn: DrawnRound) -> dict[str, float]:
        """Remove from the pool what is trained on, and update what stays.

        Returns:
            `rollout/pool_prompts` and, at the end of a cycle, `pool/*`.
        """
        pool = self.planner.pool
        pool.settle(drawn.planned, drawn.harvest.left)
        metrics: dict[str, float] = {"rollout/pool_prompts": len(pool)}
        self.audit.add(drawn.harvest, drawn.trace)
        if drawn.rule.ends_cycle(drawn.planned, list(pool)):
            metrics |= self.audit.metrics()
            self.audit = PoolAudit(carried_tokens=pool.tokens)
        return metrics

    def leave_run(self) -> int:
        """Reset the pool for a new Trainer, whose policy versions start again at 0.

        Returns:
            Number of tokens discarded.
        """
        self.audit = PoolAudit()
        self.runs += 1  # the noise that decided what is left in the pool must not come again
        return self.planner.pool.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return what one round passes to the next: primitives and tensors only."""
        return {
            **self.planner.state_dict(),
            "audit": self.audit.state_dict(),
            "runs": self.runs,
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore the state; `prompt` finds a prompt by its uid.

        Raises:
            ValueError: the position in the data belongs to other prompts.
        """
        self.planner.load_state_dict(state, prompt)
        self.audit, self.runs = PoolAudit.from_state(state["audit"]), state["runs"]
