"""From the prompts that wait to a round that can be trained on."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.rollout.audit import Attempt, DraftAudit, Harvest, PoolAudit, restart_stale, settle
from lit_rlsched.rollout.controller import Feedback
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.gradient_stream import GradientStream, Streaming
from lit_rlsched.training.round import NONFINITE, Round, check_rewards, huge_rewards
from lit_rlsched.training.round_metrics import measure
from lit_rlsched.training.selection import Stop, count_drops, replace_uninformative
from lit_rlsched.training.update import Update
from lit_rlsched.types import Group, Prompt


@dataclass(slots=True)
class RoundPlan:
    """A round before it is drawn."""

    number: int
    """Rounds before this one."""
    version: int
    """Policy version it is drawn under."""
    policy: RoundRule
    groups: list[Group]
    """One that replaces another comes last."""
    stale: list[Attempt]
    """What was thrown away, as too old."""
    began: float
    """When its planning began."""
    drafts: DraftAudit = field(default_factory=DraftAudit)
    """What became of those that it began with."""


class RoundDrawer:
    """Draws rounds, and keeps what goes from one to the next.

    Until all of a round is drawn and valued, its prompts stay in the pool as they were.

    Args:
        planner: Chooses the prompts of each.
    """

    def __init__(self, planner: RoundPlanner) -> None:
        self.planner = planner
        self.drafts = Drafts()
        self.audit = PoolAudit()
        self.runs = 0
        """Trainers before this one."""
        self._blamed: set[str] = set()

    def plan(self, number: int, version: int, policy: RoundRule) -> RoundPlan:
        """Choose the round's groups."""
        began = time.perf_counter()
        groups = self.planner.plan(policy)
        stale = restart_stale(groups, version, policy)
        return RoundPlan(number, version, policy, groups, stale, began)

    def draw(
        self,
        plan: RoundPlan,
        session: RolloutSession,
        update: Update,
        streaming: Streaming | None = None,
        max_num_gen_batches: int = 1,
    ) -> tuple[Round, Counter[str]]:
        """Decode, score and value a round, and settle what is left of it.

        Args:
            plan: What `plan` gave.
            session: Decodes and scores.
            update: Turns its groups into advantages and optimizer steps.
            streaming: When gradients are computed meanwhile.
            max_num_gen_batches: Updates' worth of prompts that may be drawn, where a prompt whose
                completions are all worth the same is replaced by another.

        Returns:
            The round, and what is counted of it: `num_tokens`, `num_completions`, `dropped/*` ...
        """
        policy, before = plan.policy, session.failures()
        began = time.perf_counter()
        self._verify(plan, plan.groups, session, update)
        verifying = time.perf_counter() - began
        feedback = self._feedback(plan, session, update, max_num_gen_batches)
        stream = self._stream(plan, session, update, streaming) if streaming else None
        for _ in session.rollout(
            plan.groups, plan.version, policy, self._salt, predict=True, feedback=feedback
        ):
            if stream:
                stream.advance(session.controller.state, session.trace)
        lengths = session.controller.lengths
        learned = {} if lengths is None else lengths.end_round()
        harvest = settle(plan.groups, policy, session.controller.state, plan.stale)
        harvest.drafts = plan.drafts
        round = Round(plan.number, plan.version, harvest.trained, session.trace)
        drawn = time.perf_counter()
        check_rewards(round, update.weights, self._sequences(policy))
        _value(round, update, stream)
        names = session.scorer.scheduler.names
        self._blame(huge_rewards(round, names, update.weights))
        round.metrics |= measure(round, harvest, plan.groups, names, update)
        round.metrics |= learned | session.metrics()
        if harvest.drafts.tokens:
            round.metrics["time/drafts"] = verifying
        if max_num_gen_batches > 1:
            batches = len(plan.groups) / policy.update_prompts
            round.metrics["dynamic_sampling/num_gen_batches"] = batches
        round.metrics["time/rollout"] = drawn - plan.began
        round.metrics["time/score"] = time.perf_counter() - drawn
        self._settle(plan, round, harvest, session)
        return round, _counts(round, harvest) + (session.failures() - before)

    def _verify(
        self, plan: RoundPlan, groups: list[Group], session: RolloutSession, update: Update
    ) -> None:
        """Make completions of the policy's out of what earlier ones had drawn."""
        plan.drafts += self.drafts.verify(
            groups,
            session.policy,
            plan.version,
            seed=update.seed,
            salt=self._salt,
            eos_token_ids=session.spec.eos_token_ids,
            micro_batch_tokens=update.micro_batch_tokens,
            forward_context=update.forward_context,
        )

    def _feedback(
        self, plan: RoundPlan, session: RolloutSession, update: Update, max_num_gen_batches: int
    ) -> Feedback:
        """What scores change in a round; a group that replaces another is added to the plan."""
        selection, weights = update.selection, update.weights
        stop = Stop(selection, weights) if selection and selection.reward_range else None
        most = max_num_gen_batches * plan.policy.update_prompts

        def another(group: Group) -> Group | None:
            if len(plan.groups) >= most:
                return None
            drawn = self.planner.replacement(group, plan.groups, plan.policy)
            if drawn is not None:
                plan.groups.append(drawn)
                plan.stale += restart_stale([drawn], plan.version, plan.policy)
                self._verify(plan, [drawn], session, update)
            return drawn

        def more(group: Group) -> Group | None:
            return replace_uninformative(group, weights, another)

        return Feedback(stop, more if max_num_gen_batches > 1 else None)

    def _stream(
        self, plan: RoundPlan, session: RolloutSession, update: Update, streaming: Streaming
    ) -> GradientStream:
        sequences = self._sequences(plan.policy)
        return GradientStream(
            streaming,
            update,
            number=plan.number,
            version=plan.version,
            divisor=(sequences, sequences * self.planner.sampling.max_completion_length),
            meanwhile=session.scorer.scheduler.turn,
        )

    def _settle(
        self, plan: RoundPlan, round: Round, harvest: Harvest, session: RolloutSession
    ) -> None:
        """Put back what is left, and take the figures of the pool."""
        pool = self.planner.pool
        pool.settle(plan.groups, harvest.left)
        self.drafts.keep(session.policy, plan.version, pool)
        round.metrics["rollout/pool_prompts"] = len(pool)
        self.audit.add(harvest, session.trace)
        if plan.policy.ends_cycle(plan.groups, list(pool)):
            round.metrics |= self.audit.metrics()
            self.audit = PoolAudit()

    def _blame(self, rewards: dict[str, float]) -> None:
        """Say once of each reward function that what it gave cannot be trained on."""
        for name in rewards.keys() - self._blamed:
            self._blamed.add(name)
            rank_zero_warn(
                f"Reward function `{name}` gave {rewards[name]:.3g}: no finite advantage follows "
                f"from it. The completion is left out of the update, and others like it; "
                f"`dropped/{NONFINITE}` counts them. Bound what the function returns."
            )

    def _sequences(self, policy: RoundRule) -> int:
        """Of an update."""
        return policy.update_prompts * self.planner.num_generations

    @property
    def _salt(self) -> str:
        """Keeps the noise of this Trainer apart from that of others."""
        return f"run {self.runs}" if self.runs else ""

    def leave_run(self) -> int:
        """Begin anew with what waits: a new Trainer's policy versions are others.

        Returns:
            Tokens that this throws away.
        """
        self.audit, self.drafts = PoolAudit(), Drafts()
        self.runs += 1  # versions come again, and noise that chose what is left must not
        return self.planner.pool.restart()

    def state_dict(self) -> dict[str, Any]:
        """What goes from one round to the next: primitives and tensors only."""
        return {
            **self.planner.state_dict(),
            "audit": self.audit.state_dict(),
            "drafts": self.drafts.state_dict(),
            "runs": self.runs,
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore; `prompt` finds a prompt by its uid.

        Raises:
            ValueError: the position in the data belongs to other prompts.
        """
        self.planner.load_state_dict(state, prompt)
        self.audit, self.runs = PoolAudit.from_state(state["audit"]), state["runs"]
        self.drafts.load_state_dict(state["drafts"])


def _value(round: Round, update: Update, stream: GradientStream | None) -> None:
    """Give advantages to what has none yet."""
    streamed = stream.streamed if stream else set()
    rest = [group for group in round.groups if group.id not in streamed]
    update.value(Round(round.number, round.version, rest))
    if stream:
        stream.finish(round)


def _counts(round: Round, harvest: Harvest) -> Counter[str]:
    """What is counted of a round, but for failures."""
    counts = {
        "num_completions": len(round.completions),
        "num_tokens": sum(map(len, round.samples)),
        "num_discarded_tokens": harvest.discarded_tokens,
        "dropped/stopped": len(harvest.stopped),
        "dropped/nonfinite_draft": harvest.drafts.nonfinite,
    }
    return Counter(counts) + count_drops(round)
