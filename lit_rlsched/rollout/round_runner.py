"""The one loop that draws rounds: what `fit` runs, and a simulation too."""

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
"""Turns the drafts of groups into completions of a policy version."""


def no_drafts(groups: Sequence[Group], version: int) -> DraftAudit:
    """For rounds that begin without drafts."""
    return DraftAudit()


@dataclass(frozen=True, slots=True)
class Watchers:
    """What the caller adds to a round that is drawn; by default nothing."""

    verify: Verify = no_drafts
    """Called with groups before they are submitted."""
    stop: EarlyStop | None = None
    """Ends groups that need no more completions."""
    is_replaced: Callable[[Group], bool] | None = None
    """Asked with each group that is complete whether another prompt shall take its place."""
    max_num_gen_batches: int = 1
    """Updates' worth of prompts that the round may draw, those that replace others included."""
    advanced: Callable[[RoundState, RolloutTrace], None] = lambda state, trace: None
    """Called each time a group has completed."""


Prepare = Callable[[list[Group]], Watchers]
"""Called with the groups of a round before anything is drawn of them."""


@dataclass(slots=True)
class DrawnRound:
    """A round that is drawn and scored; its prompts are in the pool until `commit`."""

    number: int
    """Rounds before this one."""
    version: int
    """Policy version it was drawn under."""
    rule: RoundRule
    planned: list[Group]
    """All groups it was to decode; those that replaced others come last."""
    begun: dict[str, int]
    """Tokens that each completion, by its request's id, had before the round."""
    harvest: Harvest
    """What is trained on, what stays in the pool, and what was thrown away."""
    trace: RolloutTrace
    metrics: dict[str, float] = field(default_factory=dict)


class RoundRunner:
    """Draws rounds from the prompts that wait, and keeps the figures of the pool.

    A round has two phases. `run` draws and scores it: it may add fresh prompts to the pool, and
    takes none out nor changes one; of the training it changes only what `Watchers` do. `commit`
    then settles what becomes of its prompts. A round that is interrupted before `commit` is drawn
    again as a whole.

    Args:
        planner: Chooses the prompts of each round.
    """

    def __init__(self, planner: RoundPlanner) -> None:
        self.planner = planner
        self.audit = PoolAudit()
        self.runs = 0
        """Trainers before this one."""

    @property
    def salt(self) -> str:
        """Keeps the noise of this Trainer apart from that of others."""
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
            rule: Which prompts it takes, when it is over, what becomes of the rest.
            number: Rounds before this one.
            version: Policy version of the weights.
            prepare: Gives what the caller adds.
        """
        began = time.perf_counter()
        groups = self.planner.plan(rule)
        stale = restart_stale(groups, version, rule)
        watch = prepare(groups)
        verified = time.perf_counter()
        drafts = watch.verify(groups, version)
        verifying = time.perf_counter() - verified
        begun = {Sample(g, c).id: len(c.token_ids) for g in groups for c in g.completions}

        def another(group: Group) -> Group | None:
            nonlocal drafts
            assert watch.is_replaced is not None
            if not watch.is_replaced(group) or len(groups) >= most:
                return None
            drawn = self.planner.replacement(group, groups, rule)
            if drawn is not None:
                groups.append(drawn)
                stale.extend(restart_stale([drawn], version, rule))
                drafts += watch.verify([drawn], version)
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
        """Take what is trained on out of the pool, and put back what is left.

        Returns:
            The figures of the pool: `rollout/pool_prompts` and, at the end of a cycle, `pool/*`.
        """
        pool = self.planner.pool
        pool.settle(drawn.planned, drawn.harvest.left)
        metrics: dict[str, float] = {"rollout/pool_prompts": len(pool)}
        self.audit.add(drawn.harvest, drawn.trace)
        if drawn.rule.ends_cycle(drawn.planned, list(pool)):
            metrics |= self.audit.metrics()
            self.audit = PoolAudit()
        return metrics

    def leave_run(self) -> int:
        """Begin anew with what waits: the policy versions of a new Trainer are others.

        Returns:
            Tokens that this throws away.
        """
        self.audit = PoolAudit()
        self.runs += 1  # versions come again, and noise that chose what is left must not
        return self.planner.pool.restart()

    def state_dict(self) -> dict[str, Any]:
        """What goes from one round to the next: primitives and tensors only."""
        return {
            **self.planner.state_dict(),
            "audit": self.audit.state_dict(),
            "runs": self.runs,
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore; `prompt` finds a prompt by its uid.

        Raises:
            ValueError: the position in the data belongs to other prompts.
        """
        self.planner.load_state_dict(state, prompt)
        self.audit, self.runs = PoolAudit.from_state(state["audit"]), state["runs"]
