"""Where rollout and update overlap, in one place.

In the order of a round, with the callback that asks for it:

```
engine   [ rollout n ......... drain ][ beside the update      ][ rollout n + 1 ...
trainer  [ waits     | gradients     ][ optimizer steps of n   ][ waits
               StreamedTraining: gradients of ready groups, while others decode (`TrainerHooks`)
                         DrainFilling: free slots begin n + 1 (`Following`), cut at the end
                                     AheadRollout("verify"): they go on (`ahead`)
                                     AheadRollout("importance"): n + 1 itself decodes (`ahead`)
                                     InFlightUpdates: and gets the weights of each step (`update`)
                                     a validation begins n + 1 too, with DrainFilling (`beside`)
                                                               AheadRollout: `take` gives n + 1
```
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

from torch import nn

from lit_rlsched.rollout.audit import Attempt, DraftAudit, Harvest
from lit_rlsched.rollout.next_drafts import Following
from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.rollout.round_runner import AHEAD, DrawnRound, RoundInProgress, RoundRunner
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.hooks import Drawing, TrainerHooks
from lit_rlsched.types import Group, Prompt

_ATTEMPTS = ("ran", "unfinished", "stale", "stopped", "drafted")


class Overlap:
    """Draws the next round beside the current one: the round itself, or drafts of its completions.

    The weights at its beginning and seeds decide what is drawn, timing does not. `wait` ends the
    rollout in the background; do not read the pool before.
    """

    def __init__(self, runner: RoundRunner, drafts: Drafts) -> None:
        self._runner = runner
        self._kept = drafts
        self._session: RolloutSession | None = None
        self._round: RoundInProgress | None = None
        self._following: Following | None = None
        """The next round, if drafts of it were begun beside the current one and go on."""
        self._drafts: Following | None = None
        self._drawn: DrawnRound | None = None
        self._beside: dict[str, float] = {}
        """Metrics of the rollout in the background."""
        self._metrics: dict[str, float] = {}

    def follows(self, following: Following | None) -> None:
        """Remember the drafts that a rollout has begun, if they are to go on."""
        self._following = following if following is not None and following.goes_on else None

    def ahead(self, how: Drawing, hooks: TrainerHooks) -> None:
        """Begin to draw the round after the current one, in the background until `take`.

        Nothing is begun for rounds that are not drawn ahead.
        """
        if self._following is not None:
            self._kept.keep_version(how.policy, how.version)
            self._go_on(how.session, self._following)
        elif how.update.schedule.ahead == "importance" and how.goes_on():
            if how.rule.verifies_from is not None and how.version not in self._kept.weights:
                self._kept.keep_version(how.policy, how.version)
            self._session = how.session
            self._round = self._runner.begin(
                how.session, how.rule, how.number, how.version, hooks, AHEAD
            )
            how.session.in_background(self._round.decode)

    def _go_on(self, session: RolloutSession, following: Following) -> None:
        """Draw the rest of the round's drafts, which the current rollout has begun."""
        self._session = session
        self._drafts = following
        self._beside = measured = {}

        def decode() -> None:
            began = time.perf_counter()
            session.go_on()
            measured["ahead_rollout/rollout_seconds"] = time.perf_counter() - began
            measured["ahead_rollout/tokens"] = following.tokens
            session.score_on()

        session.in_background(decode)

    def update(self, session: RolloutSession, policy: nn.Module, version: int, keep: bool) -> None:
        """Give a rollout in the background the weights of an optimizer step."""
        if session.update(version) and keep:
            self._kept.keep_version(policy, version)

    def beside(self, how: Drawing) -> Following | None:
        """Return the next round, for another rollout under the same weights to begin its drafts.

        `None` if the schedule has none, no round follows, they were begun already, or the next
        round may end early: prompts with a draft would then be ahead of others.
        """
        if how.drafts_next != "cut" or how.rule.ends_early:
            return None
        following = self._runner.begin_beside(how.rule)
        drafts = [c.draft for group in following.groups for c in group.completions if c.draft]
        if any(how.version in draft.versions for draft in drafts):
            return None  # by this validation, before it was interrupted at its end
        return following

    def keep_begun(self, how: Drawing, following: Following) -> None:
        """Put the drafts of `beside` into the pool, for the round to verify."""
        self._runner.keep_begun(following)
        self._kept.keep(how.policy, how.version, self._runner.planner.pool)

    def wait(self) -> None:
        """Wait until the rollout in the background has ended, if there is one.

        The round is then kept until `take`, or the drafts are in the pool.
        """
        if self._session is None:
            return
        began = time.perf_counter()
        try:
            self._session.wait()
        except Exception:
            self.abandon()
            raise
        self._session = None
        waited = time.perf_counter() - began
        if self._round is not None:
            self._drawn, self._round = self._round.harvest(), None
            seconds = self._drawn.metrics["time/rollout"]
            self._beside = {"ahead_rollout/rollout_seconds": seconds}
        if self._drafts is not None:
            self._runner.keep_begun(self._drafts)
            self._drafts = None
        self._metrics = {**self._beside, "ahead_rollout/wait_seconds": waited}

    def take(self) -> tuple[DrawnRound | None, dict[str, float]]:
        """Return the round, if it was drawn as a whole, and metrics of the rollout.

        They are kept until `clear`, in case the round is interrupted.
        """
        self.wait()
        return self._drawn, self._metrics

    def clear(self) -> None:
        """Forget the round that was taken."""
        self._drawn, self._metrics = None, {}

    def abandon(self) -> None:
        """Forget a rollout that has not ended; its prompts stay in the pool."""
        self._session, self._round, self._drafts = None, None, None

    @property
    def tokens(self) -> int:
        """Number of tokens of the round that `take` will return."""
        return sum(a.tokens for a in self._drawn.harvest.ran) if self._drawn else 0

    @property
    def groups(self) -> list[Group]:
        """Groups of the round that `take` will return."""
        if self._drawn is None:
            return []
        harvest = self._drawn.harvest
        return [*self._drawn.planned, *harvest.trained, *harvest.left]

    def state_dict(self) -> dict[str, Any]:
        """Return the round, as primitives and tensors; drafts are in the pool. It must be over."""
        state: dict[str, Any] = {"metrics": dict(self._metrics), "round": None}
        if self._drawn is not None:
            drawn, harvest = self._drawn, self._drawn.harvest
            state["round"] = {
                "number": drawn.number,
                "version": drawn.version,
                "planned": pack(replace(group, completions=[]) for group in drawn.planned),
                "begun": drawn.begun,
                "trained": pack(harvest.trained),
                "left": pack(harvest.left),
                "attempts": {n: [list(a) for a in getattr(harvest, n)] for n in _ATTEMPTS},
                "drafts": list(astuple(harvest.drafts)),
                "trace": drawn.trace.state_dict(),
                "failures": dict(drawn.failures),
                "metrics": dict(drawn.metrics),
            }
        return state

    def load_state_dict(
        self, state: dict[str, Any], rule: RoundRule, prompt: Callable[[str], Prompt]
    ) -> None:
        """Restore the round after `clear`; `prompt` finds a prompt by its uid."""
        self._metrics, saved = dict(state["metrics"]), state["round"]
        if saved is None:
            return
        attempts: dict[str, Any] = {
            n: [Attempt(*a) for a in of] for n, of in saved["attempts"].items()
        }
        self._drawn = DrawnRound(
            saved["number"],
            saved["version"],
            rule,
            unpack(saved["planned"], prompt),
            saved["begun"],
            Harvest(
                trained=unpack(saved["trained"], prompt),
                left=unpack(saved["left"], prompt),
                drafts=DraftAudit(*saved["drafts"]),
                **attempts,
            ),
            RolloutTrace.from_state(saved["trace"]),
            Counter(saved["failures"]),
            dict(saved["metrics"]),
        )
