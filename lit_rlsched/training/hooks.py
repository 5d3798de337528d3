"""The trainer's part in a round."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.selection import Stop, is_uninformative
from lit_rlsched.training.streamed_training import GradientStream
from lit_rlsched.training.update import Update
from lit_rlsched.training.weight_sync import allowed_gap
from lit_rlsched.types import Group


@dataclass(frozen=True, slots=True)
class Drawing:
    """Engine, weights and settings that draw a round."""

    session: RolloutSession
    policy: nn.Module
    """It has the weights of `version`."""
    update: Update
    """Trains on it; has the schedule, which `start` may change."""
    number: int
    """Number of rounds before it."""
    version: int
    start: Callable[[list[Group]], None]
    """Called with its groups before they are drawn."""
    rounds: int | None
    """Number of rounds until training ends, with this one."""

    @property
    def rule(self) -> RoundRule:
        return self.update.schedule.rule


class TrainerHooks(RoundHooks):
    """Verifies drafts, stops and replaces groups, and computes gradients, for one round."""

    def __init__(
        self, how: Drawing, drafts: Drafts, salt: str, divisor: tuple[int, int] | None = None
    ) -> None:
        self._how, self._drafts, self._salt, self._divisor = how, drafts, salt, divisor
        self.rounds = how.rounds
        self.stream: GradientStream | None = None
        """Gradients of groups that are ready while others decode."""

    def planned(self, groups: list[Group]) -> None:
        how, session, update = self._how, self._how.session, self._how.update
        waiting = {group.id for group in how.rule.waiting(groups)}
        how.start([group for group in groups if group.id not in waiting])
        schedule = update.schedule
        if (selection := schedule.selection) is not None and selection.reward_range is not None:
            self.stop = Stop(selection, update.weights)
        self.max_num_gen_batches = schedule.max_num_gen_batches
        if schedule.streaming is not None and self._divisor is not None:
            self.stream = GradientStream(
                schedule.streaming,
                update,
                self._drafts,
                number=how.number,
                version=how.version,
                divisor=self._divisor,
                meanwhile=session.scorer.turn,
            )

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        session, update = self._how.session, self._how.update
        checks = update.settings.verify_sync
        return self._drafts.verify(
            groups,
            self._how.policy,
            version,
            seed=update.settings.seed,
            salt=self._salt,
            eos_token_ids=session.spec.eos_token_ids,
            micro_batch_tokens=update.settings.micro_batch_tokens,
            forward_context=update.forward_context,
            row_cost=update.learner.row_cost(),
            allowed_gap=allowed_gap(session.engine, session.spec) if checks else math.inf,
        )

    def is_replaced(self, group: Group) -> bool:
        return is_uninformative(group, self._how.update.weights)

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        if self.stream is not None:
            self.stream.advance(state, trace)
