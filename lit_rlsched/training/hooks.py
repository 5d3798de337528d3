"""The trainer's part in a round."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.ahead_rollout import AfterRound, Correction
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.streamed_training import Streaming
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.selection import Stop, is_uninformative
from lit_rlsched.training.streamed_training import GradientStream
from lit_rlsched.training.update import Update
from lit_rlsched.training.weight_sync import allowed_gap
from lit_rlsched.types import Group


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How a round is drawn and trained on, besides its rule."""

    update: Update
    streaming: Streaming | None = None
    """When to compute gradients during the rollout."""
    max_num_gen_batches: int = 1
    """Updates' worth of prompts that a round may draw to replace uninformative groups."""
    ahead: Correction | None = None
    """Whether the next round is drawn during the update, and how its staleness is corrected."""
    fills_drain: bool = False
    """Whether slots that a round leaves free begin the next round, as drafts."""
    verify_sync: bool = True
    """Whether the engine's log-probs of drafts are compared with the trainer's."""

    @property
    def drafts_next(self) -> AfterRound | None:
        """What becomes of drafts of the next round; `None`: there are none."""
        if self.ahead == "verify":
            return "go_on"
        return "cut" if self.fills_drain else None


@dataclass(frozen=True, slots=True)
class Drawing:
    """Engine, weights, rule and settings that draw a round."""

    session: RolloutSession
    policy: nn.Module
    """It has the weights of `version`."""
    rule: RoundRule
    number: int
    """Number of rounds before it."""
    version: int
    start: Callable[[list[Group]], None]
    """Called with its groups before they are drawn."""
    settings: Callable[[], RoundSettings]
    """Called after `start`, which may change them."""


class TrainerHooks(RoundHooks):
    """Verifies drafts, stops and replaces groups, and computes gradients, for one round.

    Args:
        how: The round.
        drafts: Verifies drafts.
        salt: Part of the seeds of this Trainer.
        divisor: Sequences and tokens that the gradients of parts are divided by; `None`: no
            gradients are computed during the rollout.
    """

    def __init__(
        self, how: Drawing, drafts: Drafts, salt: str, divisor: tuple[int, int] | None = None
    ) -> None:
        self._how, self._drafts, self._salt, self._divisor = how, drafts, salt, divisor
        self.stream: GradientStream | None = None
        """Gradients of groups that are ready while others decode."""

    def planned(self, groups: list[Group]) -> None:
        how, session = self._how, self._how.session
        how.start(groups)
        settings = how.settings()
        self._update = update = settings.update
        allowed = allowed_gap(session.engine, session.spec) if settings.verify_sync else math.inf
        self._allowed = allowed
        if (selection := update.selection) is not None and selection.reward_range is not None:
            self.stop = Stop(selection, update.weights)
        self.max_num_gen_batches = settings.max_num_gen_batches
        self.drafts_next = settings.drafts_next
        if settings.streaming is not None and self._divisor is not None:
            self.stream = GradientStream(
                settings.streaming,
                update,
                self._drafts,
                number=how.number,
                version=how.version,
                divisor=self._divisor,
                meanwhile=session.scorer.turn,
            )

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        return self._drafts.verify(
            groups,
            self._how.policy,
            version,
            seed=self._update.seed,
            salt=self._salt,
            eos_token_ids=self._how.session.spec.eos_token_ids,
            micro_batch_tokens=self._update.micro_batch_tokens,
            forward_context=self._update.forward_context,
            allowed_gap=self._allowed,
        )

    def is_replaced(self, group: Group) -> bool:
        return is_uninformative(group, self._update.weights)

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        if self.stream is not None:
            self.stream.advance(state, trace)
