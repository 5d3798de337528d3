"""The loop that draws rounds, shared by `fit` and simulations."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from lit_rlsched.rollout.audit import (
    Attempt,
    DraftAudit,
    Harvest,
    PoolAudit,
    put_off_old,
    restart_stale,
    settle,
)
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.scoring import EarlyStop, Feedback
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Completion, Group, Prompt


class RoundHooks:
    """The trainer's part in a round, in the order in which the round calls it. By default nothing.

    Each round has its own object. What the attributes say is read after `planned`.
    """

    rounds: int | None = None
    """Number of rounds until training ends, with this one; read before `planned`."""
    stop: EarlyStop | None = None
    """Stops groups that need no more completions."""
    max_num_gen_batches: int = 1
    """Bound on the prompts of a round, as a multiple of an update's; above 1, `is_replaced`
    decides which prompts are replaced."""

    def planned(self, groups: list[Group]) -> None:
        """Called with the groups of the round, before anything is drawn."""

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        """Turn drafts of groups into completions of a policy version, before anything is drawn."""
        return DraftAudit()

    def is_replaced(self, group: Group) -> bool:
        """Return whether another prompt takes the place of a complete group."""
        return False

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        """Called each time a group completes."""


_ATTEMPTS = ("ran", "unfinished", "stale", "stopped")


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
    harvest: Harvest
    trace: RolloutTrace
    failures: Counter[str]
    """Failures of single completions: see `RolloutSession.failures`."""
    metrics: dict[str, float]

    @property
    def groups(self) -> list[Group]:
        """Groups as they were planned, and as they were drawn."""
        return [*self.planned, *self.harvest.trained, *self.harvest.left]

    @property
    def tokens(self) -> int:
        """Number of tokens of all its completions."""
        return sum(a.tokens for a in self.harvest.ran)

    def state_dict(self) -> dict[str, Any]:
        """Return the round, as primitives and tensors."""
        from lit_rlsched.rollout.packing import pack  # imports torch; simulations run without it

        harvest = self.harvest
        return {
            "number": self.number,
            "version": self.version,
            "planned": pack(replace(group, completions=[]) for group in self.planned),
            "trained": pack(harvest.trained),
            "left": pack(harvest.left),
            "attempts": {n: [list(a) for a in getattr(harvest, n)] for n in _ATTEMPTS},
            "drafts": list(astuple(harvest.drafts)),
            "trace": self.trace.state_dict(),
            "failures": dict(self.failures),
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], rule: RoundRule, prompt: Callable[[str], Prompt]
    ) -> "DrawnRound":
        """Create the round that `state_dict` described; `prompt` finds a prompt by its uid."""
        from lit_rlsched.rollout.packing import unpack

        attempts = {n: [Attempt(*a) for a in state["attempts"][n]] for n in _ATTEMPTS}
        trained, left = unpack(state["trained"], prompt), unpack(state["left"], prompt)
        return cls(
            state["number"],
            state["version"],
            rule,
            unpack(state["planned"], prompt),
            Harvest(trained, left, drafts=DraftAudit(*state["drafts"]), **attempts),
            RolloutTrace.from_state(state["trace"]),
            Counter(state["failures"]),
            dict(state["metrics"]),
        )


class RoundInProgress:
    """A round between its plan and its harvest; `decode` may run in a thread of its own.

    `salt` tells rounds of the same version apart.
    """

    def __init__(
        self,
        runner: "RoundRunner",
        session: RolloutSession,
        rule: RoundRule,
        number: int,
        version: int,
        hooks: RoundHooks,
        salt: str = "",
    ) -> None:
        began = time.perf_counter()
        self._planner, self.session, self._hooks = runner.planner, session, hooks
        self.rule, self.number, self.version = rule, number, version
        self._drafts, self._verifying = DraftAudit(), 0.0
        self._failed = session.failures()
        self.groups = runner.planner.plan(rule, hooks.rounds)
        old = put_off_old(self.groups, version, rule)
        self._stale = restart_stale(self.groups, version, rule)
        self._waiting = {group.id for group in rule.waiting(self.groups)}
        hooks.planned(self.groups)
        self._verify(self.groups, old)
        replaces = hooks.max_num_gen_batches > 1
        feedback = Feedback(hooks.stop, self._another if replaces else None)
        salt = f"{runner.salt} {salt}".strip()
        self._rollout = session.rollout(self.groups, version, rule, salt, True, feedback)
        self._seconds = time.perf_counter() - began

    @property
    def _due(self) -> list[Group]:
        """The groups that do not only use free slots."""
        return [group for group in self.groups if group.id not in self._waiting]

    def _verify(
        self, groups: Sequence[Group], old: Sequence[tuple[Completion, Completion]]
    ) -> None:
        """Verify tokens of earlier policies; `old` has the completions as they were before.

        A completion that keeps all its tokens keeps its scores, too.
        """
        if not old:
            return
        began = time.perf_counter()
        with self.session.timeline.doing("verify", TRAINER):
            self._drafts += self._hooks.verify(groups, self.version)
        self._verifying += time.perf_counter() - began
        for completion, was in old:
            if was.scored and completion.token_ids == was.token_ids:
                for name in ("text", "scores", "extra", "logged", "dropped"):
                    setattr(completion, name, getattr(was, name))

    def _another(self, group: Group) -> Group | None:
        """Return a group that takes the place of a complete one, if it is to be replaced."""
        most = self._hooks.max_num_gen_batches * self.rule.update_prompts
        if not self._hooks.is_replaced(group) or len(self._due) >= most:
            return None
        drawn = self._planner.replacement(group, self.groups, self.rule)
        if drawn is not None:
            self.groups.append(drawn)
            old = put_off_old([drawn], self.version, self.rule)
            self._stale.extend(restart_stale([drawn], self.version, self.rule))
            self._verify([drawn], old)
        return drawn

    def decode(self) -> None:
        """Decode and score the groups until the rule ends the round."""
        began = time.perf_counter()
        controller, trace = self.session.controller, self.session.trace
        for _ in self._rollout:
            self._hooks.advanced(controller.state, trace)
        predicted = {} if controller.lengths is None else controller.lengths.end_round()
        self._metrics = predicted | self.session.metrics()
        self._state, self._trace = controller.state, trace
        self._failed = self.session.failures() - self._failed
        self._seconds += time.perf_counter() - began

    def harvest(self) -> DrawnRound:
        """Split the decoded round into groups to train on and groups that stay in the pool."""
        harvest = settle(self.groups, self.rule, self._state, self._stale)
        harvest.drafts = self._drafts
        metrics = self._metrics
        if self._drafts.tokens:
            metrics["time/drafts"] = self._verifying
        if self._hooks.max_num_gen_batches > 1:
            batches = len(self._due) / self.rule.update_prompts
            metrics["dynamic_sampling/num_gen_batches"] = batches
        if (control_tokens := self.session.control_tokens) is not None:
            metrics |= control_tokens.of_prompts(group.prompt for group in self._due)
        metrics["time/rollout"] = self._seconds
        return DrawnRound(
            self.number,
            self.version,
            self.rule,
            self.groups,
            harvest,
            self._trace,
            self._failed,
            metrics,
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

    def run(
        self,
        session: RolloutSession,
        rule: RoundRule,
        number: int,
        version: int,
        hooks: RoundHooks | None = None,
    ) -> DrawnRound:
        """Draw and score a round."""
        begun = RoundInProgress(self, session, rule, number, version, hooks or RoundHooks())
        begun.decode()
        return begun.harvest()

    def commit(self, drawn: DrawnRound) -> dict[str, float]:
        """Remove the planned groups from the pool, except those that stay, and update these."""
        pool = self.planner.pool
        pool.settle(drawn.planned, drawn.harvest.left)
        self.audit.add(drawn.harvest, drawn.trace)
        left = [*pool]
        metrics: dict[str, float] = {"rollout/pool_prompts": len(left)}
        if drawn.rule.ends_cycle(drawn.planned, left):
            metrics |= self.audit.metrics()
            self.audit = PoolAudit(carried_tokens=pool.tokens)
        return metrics

    def leave_run(self) -> int:
        """Reset the pool for a new Trainer, whose policy versions start again at 0."""
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
        """Restore the state; `prompt` finds a prompt by its uid."""
        self.planner.load_state_dict(state, prompt)
        self.audit, self.runs = PoolAudit.from_state(state["audit"]), state["runs"]
