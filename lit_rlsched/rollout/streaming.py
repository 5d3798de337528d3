"""Gradients of groups that are ready, while the others still decode."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lit_rlsched.data.batching import OptimizerStep
from lit_rlsched.rollout.learner import Learner
from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Group, Row
from lit_rlsched.scheduling.rounds import RoundPolicy, RoundState


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
        learner: Computes gradients.
        policy: The round's: says which groups are trained on, whatever comes.
        value: Gives groups their advantages; called once with each.
        make_step: Makes a part of the optimizer step of groups.
        micro_batch_tokens: Groups are taken together until they have so many tokens.
        meanwhile: Called between two parts: reward workers wait for somebody to look at them.
    """

    def __init__(
        self,
        streaming: Streaming,
        learner: Learner,
        policy: RoundPolicy,
        value: Callable[[list[Group]], None],
        make_step: Callable[[list[Group]], OptimizerStep],
        micro_batch_tokens: int,
        meanwhile: Callable[[], None],
    ) -> None:
        self.parts: list[OptimizerStep] = []
        """What was accumulated."""
        self.streamed: set[str] = set()
        """Ids of the groups in it."""
        self._learner = learner
        self._policy = policy
        self._value = value
        self._make_step = make_step
        self._tokens = micro_batch_tokens
        self._meanwhile = meanwhile
        self._first = streaming.start * policy.update_prompts
        self._taken: set[str] = set()
        self._pending: list[Group] = []
        self._valued: list[tuple[Group, Group]] = []

    def advance(self, state: RoundState, trace: RolloutTrace) -> None:
        """Compute what is ready; the trace takes down when."""
        for group in self._policy.certain(state):
            if group.id in self._taken:
                continue
            if not group.complete:
                return  # who comes after it may share its micro-batch
            self._taken.add(group.id)
            self._pending.append(group)
            if len(self._taken) >= self._first and _tokens(self._pending) >= self._tokens:
                began = time.monotonic()
                self._accumulate()
                trace.worked(began, time.monotonic())
                self._meanwhile()

    def finish(self) -> None:
        """After the round: write what was made of the groups into them."""
        for group, copy in self._valued:
            for completion, valued in zip(group.completions, copy.completions, strict=True):
                completion.dropped, completion.advantage = valued.dropped, valued.advantage
                completion.old_logprobs = valued.old_logprobs
                completion.ref_logprobs = valued.ref_logprobs

    def _accumulate(self) -> None:
        groups, self._pending = self._pending, []
        # copies: what a selection drops must not look useless to a race that goes on
        copies = [group.copy() for group in groups]
        self._value(copies)
        part = self._make_step(copies)
        self._learner.accumulate(part)
        self.parts.append(part)
        self._valued += zip(groups, copies, strict=True)
        self.streamed.update(group.id for group in groups)


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(Row(g, c)) for g in groups for c in g.completions)
