"""Compute gradients of groups that are ready while other groups still decode."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.types import Group, Sample

if TYPE_CHECKING:
    from lit_rlsched.training.rounds import TrainerHooks


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
            self._accumulate(groups)
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

    def _accumulate(self, groups: Sequence[Group]) -> None:
        # Copies, because a race must not see which completions the selection drops.
        copies = [group.copy() for group in groups]
        round = Round(self._how.number, self._how.version, copies)
        self._update.assign_advantages(round)
        self._parts.append(self._update.accumulate(round, self._divisor, not self._parts))
        self._copies += zip(groups, copies, strict=True)
        self.streamed.update(group.id for group in groups)
