"""Gradients of groups that are ready, while the others still decode."""

import time
from collections.abc import Callable, Sequence

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.streamed_training import Parts, Streaming
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.update import Update
from lit_rlsched.types import Group


class GradientStream:
    """Takes a round's groups as they become ready and has their gradients computed.

    Args:
        streaming: When to begin.
        update: Gives groups advantages, once each; its learner computes gradients.
        number: The round's.
        version: The round's.
        divisor: See `OptimizerStep`.
        meanwhile: Called between two parts: reward workers wait for somebody to look at them.
    """

    def __init__(
        self,
        streaming: Streaming,
        update: Update,
        *,
        number: int,
        version: int,
        divisor: tuple[int, int],
        meanwhile: Callable[[], None],
    ) -> None:
        self.streamed: set[str] = set()
        """Ids of the groups whose gradients are there."""
        self._update = update
        self._number = number
        self._version = version
        self._divisor = divisor
        self._meanwhile = meanwhile
        self._ready = Parts(streaming, update.rule.update_prompts, update.micro_batch_tokens).ready
        self._parts: list[OptimizerStep] = []
        self._valued: list[tuple[Group, Group]] = []

    def advance(self, state: RoundState, trace: RolloutTrace) -> None:
        """Compute what is ready; the trace takes down when."""
        for groups in self._ready(self._update.rule.final_groups(state)):
            began = time.monotonic()
            self._accumulate(groups)
            trace.worked(began, time.monotonic())
            self._meanwhile()

    def finish(self, round: Round) -> None:
        """Write what was made of its groups into the round, and `streamed_training/*`."""
        for group, copy in self._valued:
            for completion, valued in zip(group.completions, copy.completions, strict=True):
                completion.dropped, completion.advantage = valued.dropped, valued.advantage
                completion.old_logprobs = valued.old_logprobs
                completion.ref_logprobs = valued.ref_logprobs
        round.accumulated = self._parts
        assert round.trace is not None
        streamed = sum(len(part.rows) for part in self._parts)
        round.metrics["streamed_training/streamed_share"] = streamed / len(round.completions)
        round.metrics["streamed_training/gradient_seconds"] = round.trace.work_seconds
        round.metrics["streamed_training/overlap_seconds"] = round.trace.overlap_seconds

    def _accumulate(self, groups: Sequence[Group]) -> None:
        # copies: what a selection drops must not look useless to a race that goes on
        copies = [group.copy() for group in groups]
        valued = Round(self._number, self._version, copies)
        self._update.assign_advantages(valued)
        part = self._update.part_of_step(valued, self._divisor)
        self._update.learner.accumulate(part)
        self._parts.append(part)
        self._valued += zip(groups, copies, strict=True)
        self.streamed.update(group.id for group in groups)
