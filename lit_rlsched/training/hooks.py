"""The trainer's part in a round."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.ahead_rollout import AfterRound
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
    goes_on: Callable[[], bool]
    """Whether another round follows."""

    @property
    def rule(self) -> RoundRule:
        return self.update.schedule.rule

    @property
    def drafts_next(self) -> AfterRound | None:
        """What becomes of drafts of the round after it; `None`: there are none."""
        schedule = self.update.schedule
        if schedule.ahead == "verify":
            return "go_on" if self.goes_on() else None
        return "cut" if schedule.fills_drain and self.goes_on() else None


class TrainerHooks(RoundHooks):
    """Verifies drafts, stops and replaces groups, and computes gradients, for one round."""

    def __init__(
        self, how: Drawing, drafts: Drafts, salt: str, divisor: tuple[int, int] | None = None
    ) -> None:
        self._how, self._drafts, self._salt, self._divisor = how, drafts, salt, divisor
        self.stream: GradientStream | None = None
        """Gradients of groups that are ready while others decode."""

    def planned(self, groups: list[Group]) -> None:
        how, session, update = self._how, self._how.session, self._how.update
        how.start(groups)
        schedule, settings = update.schedule, update.settings
        checks = settings.verify_sync
        self._allowed = allowed_gap(session.engine, session.spec) if checks else math.inf
        if (selection := schedule.selection) is not None and selection.reward_range is not None:
            self.stop = Stop(selection, update.weights)
        self.max_num_gen_batches = schedule.max_num_gen_batches
        self.drafts_next = how.drafts_next
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
            all_are_trained = not (how.rule.ends_early or how.rule.stops_groups)
            verifies = schedule.ahead == "verify" and all_are_trained
            scored = session.scorer.scores_drafts
            self.trains_drafts = verifies and update.verifies_drafts and scored

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        return self._drafts.verify(
            groups,
            self._how.policy,
            version,
            seed=self._how.update.settings.seed,
            salt=self._salt,
            eos_token_ids=self._how.session.spec.eos_token_ids,
            micro_batch_tokens=self._how.update.settings.micro_batch_tokens,
            forward_context=self._how.update.forward_context,
            row_cost=self._how.update.learner.row_cost,
            allowed_gap=self._allowed,
        )

    def train_drafts(
        self, groups: Sequence[Group], version: int, trace: RolloutTrace
    ) -> DraftAudit:
        assert self.stream is not None, "nothing is streamed"
        ended = self._drafts.ended(
            groups,
            version,
            seed=self._how.update.settings.seed,
            salt=self._salt,
            eos_token_ids=self._how.session.spec.eos_token_ids,
        )
        if ended.groups:
            self._how.session.score_drafts(ended.groups)
            self.stream.verify(ended, trace)
        return ended.audit

    def is_replaced(self, group: Group) -> bool:
        return is_uninformative(group, self._how.update.weights)

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        if self.stream is not None:
            self.stream.advance(state, trace)
