"""Gradients of groups that are ready, while the others still decode."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.update import Update
from lit_rlsched.types import Group, Sample


@dataclass(frozen=True, slots=True)
class Streaming:
    """When gradients are computed during a round.

    Args:
        start: Share of the update's prompts that are ready before the first is.
    """

    start: float = 0.2


class GradientStream:
    """Takes a round's groups as they become ready and has their gradients computed.

    What goes into one micro-batch follows from the order in which groups are decoded, not from when
    their scores arrive or how far the trainer has come: a run that is repeated is the same bit for
    bit.

    Args:
        streaming: When to begin.
        update: Values groups, once each; its learner computes gradients. Groups are taken together
            until they have as many tokens as a micro-batch.
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
        self._first = streaming.start * update.rule.update_prompts
        self._parts: list[OptimizerStep] = []
        self._taken: set[str] = set()
        self._pending: list[Group] = []
        self._valued: list[tuple[Group, Group]] = []

    def advance(self, state: RoundState, trace: RolloutTrace) -> None:
        """Compute what is ready; the trace takes down when."""
        for group in self._update.rule.final_groups(state):
            if group.id in self._taken:
                continue
            if not group.complete:
                return  # who comes after it may share its micro-batch
            self._taken.add(group.id)
            self._pending.append(group)
            most = self._update.micro_batch_tokens
            if len(self._taken) >= self._first and _tokens(self._pending) >= most:
                began = time.monotonic()
                self._accumulate()
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
        rows = sum(len(part.rows) for part in self._parts)
        round.metrics["streamed_training/streamed_share"] = rows / len(round.completions)
        round.metrics["streamed_training/gradient_seconds"] = round.trace.work_seconds
        round.metrics["streamed_training/overlap_seconds"] = round.trace.overlap_seconds

    def _accumulate(self) -> None:
        groups, self._pending = self._pending, []
        # copies: what a selection drops must not look useless to a race that goes on
        copies = [group.copy() for group in groups]
        valued = Round(self._number, self._version, copies)
        self._update.assign_advantages(valued)
        part = self._update.part_of_step(valued, self._divisor)
        self._update.learner.accumulate(part)
        self._parts.append(part)
        self._valued += zip(groups, copies, strict=True)
        self.streamed.update(group.id for group in groups)


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(Sample(g, c)) for g in groups for c in g.completions)
