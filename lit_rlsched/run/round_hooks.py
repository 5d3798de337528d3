"""The trainer's part in a round."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.result import DraftAudit, RoundResult
from lit_rlsched.run.position import RunPosition
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round, check_rewards, drop_stale, huge_rewards, reward_matrix
from lit_rlsched.training.round_metrics import measure
from lit_rlsched.training.selection import Pilot, Stop, count_drops
from lit_rlsched.training.streaming import Parts
from lit_rlsched.types import Completion, Group


def fire_in_module(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call a rollout hook of the module only, on a rank that does not draw."""
    if (method := getattr(trainer.lightning_module, hook, None)) is not None:
        method(*args)


def fire(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call a rollout hook of every callback that has it, then of the module."""
    module = trainer.lightning_module
    for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]
        if (method := getattr(owner, hook, None)) is not None:
            name = f"[{type(owner).__name__}].{hook}"
            with trainer.profiler.profile(name):  # type: ignore[attr-defined]
                if owner is module:
                    method(*args)
                else:
                    method(trainer, module, *args)


class TrainerHooks(RoundHooks):
    """What the trainer does in a round: each round has its own object.

    Before the rollout callbacks are told, and drafts are verified. During it prompts are replaced,
    and gradients of groups are computed that are ready (`advanced`). Afterwards `finish` makes a
    round of the result that the optimizer can train on.
    """

    def __init__(self, run: RunPosition, number: int, beside: bool = False) -> None:
        self._trainer, schedule = run.trainer, run.schedule
        self.number, self.version, self.update = number, self._trainer.global_step, run.update
        self._run, self._rule = run, schedule.rule
        self.replaces = schedule.replacement is not None
        self.sequences = self._rule.update_prompts * run.settings.num_generations
        """Completions of an update."""
        # divides gradients before it is known what is dropped; beside an update there are none
        self._divisor = self.sequences, self.sequences * run.settings.sampling.max_completion_length
        self._parts: Parts | None = None
        if schedule.streaming is not None and not beside:
            tokens = run.settings.micro_batch_tokens
            self._parts = Parts(schedule.streaming, self._rule.update_prompts, tokens)
        self._accumulated: list[OptimizerStep] = []
        self._copies: list[tuple[Group, Group]] = []

    def planned(self, state: RoundState) -> None:
        start = partial(fire, self._trainer, "on_round_start")
        self._run.team.call("round_start", start, state.due)
        selection = self._run.schedule.selection  # which the hook may have changed
        if selection is not None and selection.reward_range is not None:
            self.stop = Stop(selection, self.update.weights)
        elif (pilot := self._run.schedule.pilot) is not None:
            self.stop, self.pilot = Pilot(pilot, self.update.weights), pilot

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        run, policy = self._run, self._run.startup.policy
        assert run.session is not None
        ends = None if run.session.turns else run.session.spec.eos_token_ids
        return run.drafts.verify(groups, policy, version, self.update, ends, run.pool.seed_domain)

    def completion_ended(self, completion: Completion) -> None:
        fire(self._trainer, "on_completion_end", completion)

    def group_ended(self, group: Group) -> None:
        fire(self._trainer, "on_group_end", group)

    def another(self, group: Group, state: RoundState) -> Group | None:
        run, rule, replacement = self._run, self._rule, self._run.schedule.replacement
        size = len(state.due), rule.update_prompts
        if replacement is None or not replacement.replaces(group, *size, self.update.weights):
            return None
        return run.pool.replacement(group, state.planned, rule)

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        """Compute the gradients of groups that are certain to be trained on: RollPacker's stream.

        engine   [ a a a  b b  c c c c c  d d d d d d d d d ]
        trainer          [ a and b ]    [ c ]               [ d, optimizer step ]
        """
        if self._parts is None:
            return
        session = self._run.session
        assert session is not None
        for groups in self._parts.ready(self._rule.final_groups(state)):
            began = time.monotonic()
            # copies, because a race must not see which completions the selection drops
            copies = [group.copy() for group in groups]
            part = Round(self.number, self.version, copies)
            self.update.assign_advantages(part)
            task = self.update.accumulate_part, part, self._divisor, not self._accumulated
            self._accumulated.append(self.update.team.call("accumulate", *task))
            self._copies += zip(groups, copies, strict=True)
            trace.work_times.append((began, time.monotonic()))
            session.scorer.serve()  # the reward workers wait between two parts

    def finish(self, result: RoundResult) -> tuple[Round, Counter[str]]:
        """Return the round that is trained on, with its advantages, and what it adds to counters.

        The counters are `num_tokens`, `num_completions`, `dropped/*` and others.
        """
        update, names = self.update, self._run.settings.rewards.names
        round = Round(self.number, self.version, result.trained, result.trace)
        first = self.pilot or self._run.settings.num_generations
        check_rewards(round, update.weights, self._rule.update_prompts * first)
        drop_stale(round, self._rule.max_staleness)
        streamed = {group.id for group, _ in self._copies}
        rest = [group for group in round.groups if group.id not in streamed]
        update.assign_advantages(Round(self.number, self.version, rest))
        if self._parts is not None:
            self._take_streamed(round, result)
        for text in self._run.advice.of_rewards(huge_rewards(round, names, update.weights)):
            rank_zero_warn(text)
        round.metrics |= measure(round, result, names, update) | result.metrics
        rewards = reward_matrix(round.groups, update.weights).tolist()
        self._run.statistics.observe(round.number, round.groups, rewards)
        counts = {
            "num_completions": len(round.completions),
            "num_tokens": sum(map(len, round.samples)),
            "num_discarded_tokens": result.discarded_tokens,
            "dropped/stopped": len(result.stopped),
            "dropped/nonfinite_draft": result.drafts.nonfinite,
            "dropped/lost_draft": result.drafts.lost,
        }
        return round, Counter(counts) + count_drops(round) + result.failures

    def _take_streamed(self, round: Round, result: RoundResult) -> None:
        """Copy what was computed during the rollout into the round."""
        for group, copy in self._copies:
            for completion, done in zip(group.completions, copy.completions, strict=True):
                completion.dropped, completion.advantage = done.dropped, done.advantage
                completion.old_logprobs = done.old_logprobs
                completion.ref_logprobs = done.ref_logprobs
        round.accumulated = self._accumulated
        streamed = {sample.id for part in self._accumulated for sample in part.samples}
        round.metrics["streamed_training/streamed_share"] = len(streamed) / len(round.completions)
        round.metrics["streamed_training/gradient_seconds"] = result.trace.work_seconds
        round.metrics["streamed_training/overlap_seconds"] = result.trace.overlap_seconds
