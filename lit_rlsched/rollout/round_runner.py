"""The loop that draws rounds, shared by `fit` and simulations."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rlsched.rollout.audit import (
    DraftAudit,
    Harvest,
    PoolAudit,
    give_scores_back,
    put_off_old,
    restart_stale,
    settle,
)
from lit_rlsched.rollout.controller import Verify
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.next_drafts import Following
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.scoring import Feedback
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.ahead_rollout import FORWARD
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Group, Prompt, Sample

AHEAD = "ahead"
"""Part of the seeds of a round drawn ahead: another round may have its policy version and
prompts."""
BESIDE = "beside"
"""Part of the seeds of completions drawn beside a validation."""


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
    failures: Counter[str]
    """Failures of single completions: see `RolloutSession.failures`."""
    metrics: dict[str, float] = field(default_factory=dict)
    following: Following | None = None
    """The next round, whose drafts the rollout has drawn."""


class RoundInProgress:
    """A round between its plan and its harvest; `decode` may run in a thread of its own."""

    def __init__(
        self,
        runner: "RoundRunner",
        session: RolloutSession,
        rule: RoundRule,
        number: int,
        version: int,
        salt: str,
        hooks: RoundHooks,
    ) -> None:
        began = time.perf_counter()
        self._planner = planner = runner.planner
        self._session = session
        self.rule, self.number, self.version = rule, number, version
        self.groups = planner.plan(rule)
        before = put_off_old(self.groups, version, rule)
        self._stale = restart_stale(self.groups, version, rule)
        self._hooks = hooks
        hooks.planned(self.groups)
        self._drafts, self._verifying = DraftAudit(), 0.0
        self._begun: dict[str, int] = {}
        self._metrics: dict[str, float] = {}
        self._failed = session.failures()
        replaces = hooks.max_num_gen_batches > 1
        feedback = Feedback(hooks.stop, self._another if replaces else None)
        self._following, how = None, hooks.drafts_next
        in_parts = how == "go_on" or hooks.trains_drafts
        if not in_parts:
            self._verify_begun(self.groups)
        give_scores_back(before)
        if how is not None:
            following = planner.plan_following(rule, self.groups)
            self._following = Following(following, runner.salt_with(AHEAD), how == "go_on")
        share = 1.0 if hooks.trains_drafts else FORWARD
        verify = Verify(self._verify_begun, self._train_begun, share)
        self._rollout = session.rollout(
            self.groups,
            version,
            rule,
            salt,
            predict=True,
            feedback=feedback,
            following=self._following,
            verify=verify if in_parts else None,
        )
        self._seconds = time.perf_counter() - began

    def _verify_begun(self, groups: Sequence[Group]) -> None:
        """Verify the drafts of groups, before anything is drawn for them in this round."""
        self._verify(groups)
        samples = [Sample(g, c) for g in groups for c in g.completions]
        self._begun |= {sample.id: len(sample.completion.token_ids) for sample in samples}
        self._session.scorer.forget_ahead({s.id for s in samples if not s.completion.finished})

    def _train_begun(self, groups: Sequence[Group]) -> None:
        """Verify the drafts of groups, if possible with the pass that trains on them."""
        if self._hooks.trains_drafts:
            self._drafts += self._hooks.train_drafts(groups, self.version, self._session.trace)
        self._verify_begun(groups)

    def _verify(self, groups: Sequence[Group]) -> None:
        verified = time.perf_counter()
        with self._session.timeline.doing("verify", TRAINER):
            self._drafts += self._hooks.verify(groups, self.version)
        self._verifying += time.perf_counter() - verified

    def _another(self, group: Group) -> Group | None:
        """Return a group that takes the place of a complete one, if it is to be replaced."""
        most = self._hooks.max_num_gen_batches * self.rule.update_prompts
        if not self._hooks.is_replaced(group) or len(self.groups) >= most:
            return None
        drawn = self._planner.replacement(group, self.groups, self.rule)
        if drawn is not None:
            self.groups.append(drawn)
            self._stale.extend(restart_stale([drawn], self.version, self.rule))
            self._verify([drawn])
        return drawn

    def decode(self) -> None:
        """Decode and score the groups until the rule ends the round."""
        began = time.perf_counter()
        controller, trace = self._session.controller, self._session.trace
        beside_update = self._hooks.drafts_next == "go_on"
        for _ in self._rollout:
            if beside_update and controller.intervenes:
                continue  # the engine would wait now, and decodes beside the update
            self._hooks.advanced(controller.state, trace)
        self._metrics = controller.end_predictions() | self._session.metrics()
        self._state, self._trace = controller.state, trace
        self._failed = self._session.failures() - self._failed
        self._seconds += time.perf_counter() - began

    def harvest(self) -> DrawnRound:
        """Split the decoded round into groups to train on and groups that stay in the pool."""
        harvest = settle(self.groups, self.rule, self._state, self._stale)
        harvest.drafts = self._drafts
        metrics = self._metrics
        if self._following is not None:
            metrics["rollout/draft_tokens"] = harvest.draft_tokens = self._following.tokens
            metrics["rollout/drafts_begun"] = self._following.begun
        if self._drafts.tokens:
            metrics["time/drafts"] = self._verifying
        if self._hooks.max_num_gen_batches > 1:
            batches = len(self.groups) / self.rule.update_prompts
            metrics["dynamic_sampling/num_gen_batches"] = batches
        if (control_tokens := self._session.control_tokens) is not None:
            metrics |= control_tokens.of_prompts(group.prompt for group in self.groups)
        metrics["time/rollout"] = self._seconds
        return DrawnRound(
            self.number,
            self.version,
            self.rule,
            self.groups,
            self._begun,
            harvest,
            self._trace,
            self._failed,
            metrics,
            self._following,
        )


class RoundRunner:
    """Draws rounds in two phases, so that an interrupted round can be drawn again.

    `run` draws and scores a round. It may add fresh prompts to the pool, but neither removes nor
    changes any. `commit` then removes what is trained on. A round that is interrupted before
    `commit` is drawn again as a whole.
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

    def salt_with(self, more: str) -> str:
        """Return a salt for draws with a round's policy version and other noise."""
        return f"{self.salt} {more}".strip()

    def begin(
        self,
        session: RolloutSession,
        rule: RoundRule,
        number: int,
        version: int,
        hooks: RoundHooks | None = None,
        salt: str = "",
    ) -> RoundInProgress:
        """Plan a round and give the engine the weights; the arguments are those of `run`.

        `salt` tells rounds of the same version apart.
        """
        salt = self.salt_with(salt)
        return RoundInProgress(self, session, rule, number, version, salt, hooks or RoundHooks())

    def run(
        self,
        session: RolloutSession,
        rule: RoundRule,
        number: int,
        version: int,
        hooks: RoundHooks | None = None,
    ) -> DrawnRound:
        """Draw and score a round."""
        begun = self.begin(session, rule, number, version, hooks)
        begun.decode()
        return begun.harvest()

    def commit(self, drawn: DrawnRound) -> dict[str, float]:
        """Remove the planned groups from the pool, except those that stay, and update these."""
        pool, following = self.planner.pool, drawn.following
        pool.settle(drawn.planned, drawn.harvest.left)
        self.audit.add(drawn.harvest, drawn.trace)
        if following is not None and not following.goes_on:
            self.keep_begun(following)
        left = self.planner.follow()
        metrics: dict[str, float] = {"rollout/pool_prompts": len(left)}
        if drawn.rule.ends_cycle(drawn.planned, left):
            metrics |= self.audit.metrics()
            self.audit = PoolAudit(carried_tokens=pool.tokens)
        return metrics

    def begin_beside(self, rule: RoundRule) -> Following:
        """Plan the next round, whose drafts another rollout draws; `keep_begun` takes them."""
        return Following(self.planner.plan(rule), self.salt_with(BESIDE), goes_on=False)

    def keep_begun(self, following: Following) -> None:
        """Put the drafts of a rollout that has ended into the pool."""
        self.audit.carried_tokens += following.tokens
        following.put_off()
        self.planner.pool.settle(following.groups, following.groups)

    def leave_run(self) -> int:
        """Reset the pool for a new Trainer, whose policy versions start again at 0."""
        self.audit = PoolAudit()
        self.runs += 1  # the noise that decided what is left in the pool must not come again
        self.planner.follow()
        return self.planner.pool.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return what one round passes to the next: primitives and tensors only."""
        return {
            **self.planner.state_dict(),
            "audit": self.audit.state_dict(),
            "runs": self.runs,
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore the state; `prompt` finds a prompt by its uid."""
        self.planner.load_state_dict(state, prompt)
        self.audit, self.runs = PoolAudit.from_state(state["audit"]), state["runs"]
