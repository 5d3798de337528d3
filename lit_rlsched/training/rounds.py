"""Draw rounds and make them ready for the optimizer."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.rollout.audit import Harvest
from lit_rlsched.rollout.next_drafts import Following
from lit_rlsched.rollout.round_runner import RoundRunner, Watchers
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.ahead_rollout import AfterRound, Correction
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.streamed_training import Streaming
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.next_round import NextRound
from lit_rlsched.training.round import (
    NONFINITE,
    Round,
    check_rewards,
    drop_stale,
    huge_rewards,
)
from lit_rlsched.training.round_metrics import measure
from lit_rlsched.training.selection import Stop, count_drops, is_uninformative
from lit_rlsched.training.streamed_training import GradientStream
from lit_rlsched.training.update import Update
from lit_rlsched.training.weight_sync import allowed_gap
from lit_rlsched.types import Group, Prompt


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
    """Engine, weights, rule and hooks that draw a round."""

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


class TrainingRounds:
    """Draws rounds that are ready for the optimizer.

    A round's prompts stay in the pool unchanged until all of it is drawn and has its advantages.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self.runner = runner
        self.next = NextRound(runner)
        self.drafts = Drafts()
        self._following: Following | None = None
        """The next round, if drafts of it were begun beside the current one."""
        self._blamed: set[str] = set()

    def draw(self, how: Drawing) -> tuple[Round, Counter[str]]:
        """Draw the next round, assign its advantages, and settle the rest of it.

        A round that was drawn ahead is not drawn again. The returned counters are `num_tokens`,
        `num_completions`, `dropped/*` ...
        """
        planner, stream = self.runner.planner, None
        sequences = how.rule.update_prompts * planner.num_generations
        drawn, ahead = self.next.take()
        rollout_ended = None
        if drawn is None:

            def watchers(groups: list[Group]) -> Watchers:
                nonlocal stream
                how.start(groups)
                settings = how.settings()
                if settings.streaming is not None:
                    stream = GradientStream(
                        settings.streaming,
                        settings.update,
                        self.drafts,
                        number=how.number,
                        version=how.version,
                        divisor=(sequences, sequences * planner.sampling.max_completion_length),
                        meanwhile=how.session.scorer.turn,
                    )
                return self._watchers(how, settings, stream)

            drawn = self.runner.run(how.session, how.rule, how.number, how.version, watchers)
            rollout_ended = how.session.rollout_ended
        timeline = how.session.timeline
        timeline.mark(rollout_ended)
        update, names = how.settings().update, how.session.scorer.names
        began = timeline.now()
        round = Round(how.number, how.version, drawn.harvest.trained, drawn.trace)
        check_rewards(round, update.weights, sequences)
        drop_stale(round, how.rule.max_staleness)
        if update.needs_old_logprobs:
            self.drafts.give_old_logprobs(round.completions, round.version)
        streamed = stream.streamed if stream else set()
        rest = [group for group in round.groups if group.id not in streamed]
        update.assign_advantages(Round(how.number, how.version, rest))
        if stream:
            stream.finish(round)
        self._blame(huge_rewards(round, names, update.weights))
        round.metrics |= measure(round, drawn.harvest, drawn.planned, names, update)
        if "ahead_rollout/tokens" in ahead:
            ahead = {**ahead, "ahead_rollout/rewards_kept": how.session.scorer.kept_ahead}
        round.metrics |= drawn.metrics | ahead
        timeline.add(TRAINER, "advantages", began, timeline.now())
        round.metrics["time/advantages"] = timeline.now() - began
        round.metrics |= self.runner.commit(drawn)
        self.next.clear()
        following = drawn.following
        self._following = following if following is not None and following.goes_on else None
        old = how.rule.verifies_from is not None
        self.drafts.keep(how.policy, how.version, planner.pool, all_tokens=old)
        return round, _counts(round, drawn.harvest) + drawn.failures

    def draw_ahead(self, how: Drawing) -> None:
        """Begin to draw the round after the current one, in the background until the next `draw`.

        Nothing is begun for rounds that are not drawn ahead.
        """
        correction = how.settings().ahead
        if self._following is not None:
            self.drafts.keep_version(how.policy, how.version)
            self.next.go_on(how.session, self._following)
        elif correction == "importance":
            if how.rule.verifies_from is not None and how.version not in self.drafts.weights:
                self.drafts.keep_version(how.policy, how.version)

            def watchers(groups: list[Group]) -> Watchers:
                how.start(groups)
                return self._watchers(how, how.settings(), None)

            self.next.begin(how.session, how.rule, how.number, how.version, watchers)

    def begin_beside(self, how: Drawing) -> Following | None:
        """Return the next round, for another rollout under the same weights to begin its drafts.

        `None` if the schedule has none, no round follows, they were begun already, or the next
        round may end early: prompts with a draft would then be ahead of others.
        """
        if not how.settings().fills_drain or how.rule.ends_early:
            return None
        following = self.runner.begin_beside(how.rule)
        drafts = [c.draft for group in following.groups for c in group.completions if c.draft]
        if any(how.version in draft.versions for draft in drafts):
            return None  # by this validation, before it was interrupted at its end
        return following

    def keep_begun(self, how: Drawing, following: Following) -> None:
        """Put the drafts of `begin_beside` into the pool, for the round to verify."""
        self.runner.keep_begun(following)
        self.drafts.keep(how.policy, how.version, self.runner.planner.pool)

    def _watchers(
        self, how: Drawing, settings: RoundSettings, stream: GradientStream | None
    ) -> Watchers:
        update, batches, session = settings.update, settings.max_num_gen_batches, how.session
        allowed = allowed_gap(session.engine, session.spec) if settings.verify_sync else math.inf
        selection, weights = update.selection, update.weights
        return Watchers(
            verify=lambda groups, version: self.drafts.verify(
                groups,
                how.policy,
                version,
                seed=update.seed,
                salt=self.runner.salt,
                eos_token_ids=session.spec.eos_token_ids,
                micro_batch_tokens=update.micro_batch_tokens,
                forward_context=update.forward_context,
                allowed_gap=allowed,
            ),
            stop=Stop(selection, weights) if selection and selection.reward_range else None,
            is_replaced=(lambda group: is_uninformative(group, weights)) if batches > 1 else None,
            max_num_gen_batches=batches,
            advanced=stream.advance if stream else lambda state, trace: None,
            drafts_next=settings.drafts_next,
        )

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
        lost = self.next.tokens
        self.drafts, self.next = Drafts(), NextRound(self.runner)
        return lost + self.runner.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, primitives and tensors only."""
        self.next.wait()
        return {
            **self.runner.state_dict(),
            "drafts": self.drafts.weights,
            "next": self.next.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], rule: RoundRule, prompt: Callable[[str], Prompt]
    ) -> None:
        """Restore the state; `prompt` finds a prompt by its uid."""
        self.runner.load_state_dict(state, prompt)
        self.drafts = Drafts()
        self.drafts.weights = dict(state["drafts"])
        self.next.clear()
        if "next" in state:
            self.next.load_state_dict(state["next"], rule, prompt)


def _counts(round: Round, harvest: Harvest) -> Counter[str]:
    counts = {
        "num_completions": len(round.completions),
        "num_tokens": sum(map(len, round.samples)),
        "num_discarded_tokens": harvest.discarded_tokens,
        "dropped/stopped": len(harvest.stopped),
        "dropped/nonfinite_draft": harvest.drafts.nonfinite,
    }
    return Counter(counts) + count_drops(round)
