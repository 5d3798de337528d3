"""Draw rounds and make them ready for the optimizer.

With `AsyncRollout` the next round is drawn beside the update of the current one:

```
engine   [ round n ........ ][ round n + 1 .............. ][ round n + 2 ...
trainer  [ waits            ][ update of n ][ waits       ][ update of n + 1 ...
                             `draw_ahead`   `draw`
```
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.rollout.audit import DraftAudit, Harvest
from lit_rlsched.rollout.round_runner import DrawnRound, RoundHooks, RoundInProgress, RoundRunner
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import (
    NONFINITE,
    Round,
    check_rewards,
    drop_stale,
    huge_rewards,
)
from lit_rlsched.training.round_metrics import measure
from lit_rlsched.training.selection import Stop, count_drops, is_uninformative
from lit_rlsched.training.update import Update
from lit_rlsched.types import Group, Prompt, Sample

AHEAD = "ahead"
"""Part of the seeds of a round drawn ahead: another round may have its policy version and
prompts."""


class Parts:
    """Cuts the groups that a round will train on into parts, each as large as a micro-batch.

    RollPacker's stream trainer. The first part waits for the share `start` of an update's prompts.
    Parts depend only on the order in which groups are decoded, not on when scores arrive or how
    fast the trainer is, so that a repeated run is equal bit for bit.
    """

    def __init__(self, start: float, update_prompts: int, part_tokens: int) -> None:
        self._first = start * update_prompts
        self._part_tokens = part_tokens
        self._taken: set[str] = set()
        self._pending: list[Group] = []
        self._tokens = 0  # of `_pending`

    def ready(self, final_groups: Sequence[Group]) -> Iterator[list[Group]]:
        """Yield the parts that have become ready; more scores may arrive between two of them."""
        for group in final_groups:
            if group.id in self._taken:
                continue
            if not group.complete:
                return  # later groups may belong to its part
            self._taken.add(group.id)
            self._pending.append(group)
            self._tokens += sum(len(Sample(group, c)) for c in group.completions)
            if len(self._taken) >= self._first and self._tokens >= self._part_tokens:
                part, self._pending, self._tokens = self._pending, [], 0
                yield part


class GradientStream:
    """Accumulates the gradients of a round's groups as they become ready.

    `start` is that of `Parts`, `divisor` that of `OptimizerStep`.
    """

    def __init__(self, start: float, how: "TrainerHooks", divisor: tuple[int, int]) -> None:
        self.streamed: set[str] = set()
        """Ids of the groups whose gradients are accumulated."""
        self._how, self._update, self._divisor = how, how.update, divisor
        tokens = how.update.settings.micro_batch_tokens
        self._ready = Parts(start, how.rule.update_prompts, tokens).ready
        self._parts: list[OptimizerStep] = []
        self._copies: list[tuple[Group, Group]] = []

    def advance(self, state: RoundState, trace: RolloutTrace) -> None:
        """Accumulate the gradients of groups that are ready, and record the time in the trace."""
        for groups in self._ready(self._how.rule.final_groups(state)):
            began = time.monotonic()
            # Copies, because a race must not see which completions the selection drops.
            copies = [group.copy() for group in groups]
            round = Round(self._how.number, self._how.version, copies)
            self._update.assign_advantages(round)
            task = self._update.accumulate_part, round, self._divisor, not self._parts
            self._parts.append(self._update.team.call("accumulate", *task))
            self._copies += zip(groups, copies, strict=True)
            self.streamed.update(group.id for group in groups)
            trace.worked(began, time.monotonic())
            self._how.session.scorer.turn()  # serve the reward workers between two parts

    def finish(self, round: Round) -> None:
        """Copy the results of the streamed groups and `streamed_training/*` into the round."""
        for group, copy in self._copies:
            for completion, done in zip(group.completions, copy.completions, strict=True):
                completion.dropped, completion.advantage = done.dropped, done.advantage
                completion.old_logprobs = done.old_logprobs
                completion.ref_logprobs = done.ref_logprobs
        round.accumulated = self._parts
        assert round.trace is not None
        streamed = {sample.id for part in self._parts for sample in part.samples}
        round.metrics["streamed_training/streamed_share"] = len(streamed) / len(round.completions)
        round.metrics["streamed_training/gradient_seconds"] = round.trace.work_seconds
        round.metrics["streamed_training/overlap_seconds"] = round.trace.overlap_seconds


@dataclass
class TrainerHooks(RoundHooks):
    """Engine, weights and settings that draw a round, and the trainer's part in it.

    It verifies drafts, stops and replaces groups, and computes gradients.
    """

    session: RolloutSession
    policy: nn.Module
    """It has the weights of `version`."""
    update: Update
    """Trains on it; has the schedule, which `start` may change."""
    drafts: Drafts
    salt: str
    """That of the runner."""
    number: int
    """Number of rounds before it."""
    version: int
    start: Callable[[list[Group]], None]
    """Called with its groups before they are drawn."""
    rounds: int | None = None
    divisor: tuple[int, int] | None = None
    """Divides gradients of groups that are ready while others decode; `None`: there are none."""
    stream: GradientStream | None = None
    """Those gradients."""

    @property
    def rule(self) -> RoundRule:
        return self.update.schedule.rule

    def planned(self, groups: list[Group]) -> None:
        waiting = {group.id for group in self.rule.waiting(groups)}
        self.start([group for group in groups if group.id not in waiting])
        schedule = self.update.schedule
        if (selection := schedule.selection) is not None and selection.reward_range is not None:
            self.stop = Stop(selection, self.update.weights)
        self.max_num_gen_batches = schedule.max_num_gen_batches
        if schedule.streaming is not None and self.divisor is not None:
            self.stream = GradientStream(schedule.streaming, self, self.divisor)

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        settings = self.update.settings
        return self.drafts.verify(
            groups,
            self.policy,
            version,
            seed=settings.seed,
            salt=self.salt,
            eos_token_ids=self.session.spec.eos_token_ids,
            micro_batch_tokens=settings.micro_batch_tokens,
            forward_context=self.update.forward_context,
            row_cost=self.update.learner.row_cost(),
        )

    def is_replaced(self, group: Group) -> bool:
        return is_uninformative(group, self.update.weights)

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        if self.stream is not None:
            self.stream.advance(state, trace)


class TrainingRounds:
    """Draws rounds that are ready for the optimizer.

    A round's prompts stay in the pool unchanged until all of it is drawn and has its advantages.
    The weights at the beginning of a rollout and seeds decide what is drawn, timing does not.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self.runner = runner
        self.drafts = Drafts()
        self.ahead: RoundInProgress | None = None
        """The round that is drawn in the background; do not read the pool before `wait`. Without
        it, a rollout is forgotten that has not ended; its prompts stay in the pool."""
        self.next: DrawnRound | None = None
        """The round that was drawn in the background, until it is ready for the optimizer."""
        self._blamed: set[str] = set()

    def draw(self, how: TrainerHooks) -> tuple[Round, Counter[str]]:
        """Draw the next round, assign its advantages, and settle the rest of it.

        A round that was drawn ahead is not drawn again. The returned counters are `num_tokens`,
        `num_completions`, `dropped/*` ...
        """
        planner, session = self.runner.planner, how.session
        sequences = how.rule.update_prompts * planner.num_generations
        self.wait()
        drawn, rollout_ended = self.next, None
        if drawn is None:
            how.divisor = sequences, sequences * planner.sampling.max_completion_length
            drawn = self.runner.run(session, how.rule, how.number, how.version, how)
            rollout_ended = session.rollout_ended
        timeline, stream = session.timeline, how.stream
        timeline.mark(rollout_ended)
        update, names = how.update, session.scorer.names
        began = timeline.now()
        round = Round(how.number, how.version, drawn.harvest.trained, drawn.trace)
        check_rewards(round, update.weights, sequences)
        drop_stale(round, how.rule.max_staleness)
        streamed = stream.streamed if stream else set()
        rest = [group for group in round.groups if group.id not in streamed]
        update.assign_advantages(Round(how.number, how.version, rest))
        if stream:
            stream.finish(round)
        self._blame(huge_rewards(round, names, update.weights))
        round.metrics |= measure(round, drawn.harvest, drawn.planned, names, update)
        round.metrics |= drawn.metrics
        timeline.add(TRAINER, "advantages", began, timeline.now())
        round.metrics["time/advantages"] = timeline.now() - began
        round.metrics |= self.runner.commit(drawn)
        self.next = None
        if how.rule.verifies_from is not None:
            self.drafts.keep(how.policy, how.version, planner.pool)
        return round, _counts(round, drawn.harvest) + drawn.failures

    def draw_ahead(self, how: TrainerHooks) -> None:
        """Begin to draw the round after the current one, in the background until `wait`."""
        if how.rounds == 0:
            return
        if how.rule.verifies_from is not None and how.version not in self.drafts.weights:
            self.drafts.keep_version(how.policy, how.version)
        self.ahead = RoundInProgress(
            self.runner, how.session, how.rule, how.number, how.version, how, AHEAD
        )
        how.session.in_background(self.ahead.decode)

    def wait(self) -> None:
        """Wait until the rollout in the background has ended, if there is one."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        began = time.perf_counter()
        ahead.session.wait()
        waited = time.perf_counter() - began
        self.next = ahead.harvest()
        self.next.metrics |= {
            "async_rollout/rollout_seconds": self.next.metrics["time/rollout"],
            "async_rollout/wait_seconds": waited,
        }

    def drop_next(self) -> int:
        """Forget the next round, if there is one; return the tokens that were drawn of it."""
        tokens = self.next.tokens if self.next else 0
        self.ahead = self.next = None
        return tokens

    def _blame(self, rewards: dict[str, float]) -> None:
        """Warn once about each reward function whose scores cannot be trained on."""
        for name in rewards.keys() - self._blamed:
            self._blamed.add(name)
            rank_zero_warn(
                f"Reward function `{name}` gave {rewards[name]:.3g}, from which no finite "
                f"advantage can be computed. This completion and others like it are left out of "
                f"the update and counted in `dropped/{NONFINITE}`. Bound what the function returns."
            )

    def leave_run(self) -> int:
        """Restart the pool for a new Trainer's policy versions; return the discarded tokens."""
        self.drafts = Drafts()
        return self.drop_next() + self.runner.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, primitives and tensors only."""
        self.wait()
        return {
            **self.runner.state_dict(),
            "drafts": self.drafts.weights,
            "next": self.next.state_dict() if self.next else None,
        }

    def load_state_dict(
        self, state: dict[str, Any], rule: RoundRule, prompt: Callable[[str], Prompt]
    ) -> None:
        """Restore the state; `prompt` finds a prompt by its uid."""
        self.runner.load_state_dict(state, prompt)
        self.drafts, saved = Drafts(), state["next"]
        self.drafts.weights = dict(state["drafts"])
        self.ahead = None
        self.next = DrawnRound.from_state(saved, rule, prompt) if saved else None


def _counts(round: Round, harvest: Harvest) -> Counter[str]:
    counts = {
        "num_completions": len(round.completions),
        "num_tokens": sum(map(len, round.samples)),
        "num_discarded_tokens": harvest.discarded_tokens,
        "dropped/stopped": len(harvest.stopped),
        "dropped/nonfinite_draft": harvest.drafts.nonfinite,
        "dropped/lost_draft": harvest.drafts.lost,
    }
    return Counter(counts) + count_drops(round)
