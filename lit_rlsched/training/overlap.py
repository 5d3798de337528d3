"""Draws the next round beside the update of the current one.

```
engine   [ round n ........ ][ round n + 1 .............. ][ round n + 2 ...
trainer  [ waits            ][ update of n ][ waits       ][ update of n + 1 ...
                             `ahead`         `take`
```
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

from lit_rlsched.rollout.audit import Attempt, DraftAudit, Harvest
from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.rollout.round_runner import DrawnRound, RoundInProgress, RoundRunner
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.hooks import Drawing, TrainerHooks
from lit_rlsched.types import Group, Prompt

AHEAD = "ahead"
"""Part of the seeds of a round drawn ahead: another round may have its policy version and
prompts."""
_ATTEMPTS = ("ran", "unfinished", "stale", "stopped")


class Overlap:
    """Draws the next round beside the current one.

    The weights at its beginning and seeds decide what is drawn, timing does not. `wait` ends the
    rollout in the background; do not read the pool before.
    """

    def __init__(self, runner: RoundRunner, drafts: Drafts) -> None:
        self._runner = runner
        self._kept = drafts
        self._session: RolloutSession | None = None
        self._round: RoundInProgress | None = None
        self._drawn: DrawnRound | None = None
        self._metrics: dict[str, float] = {}

    def ahead(self, how: Drawing, hooks: TrainerHooks) -> None:
        """Begin to draw the round after the current one, in the background until `take`."""
        if how.rounds == 0:
            return
        if how.rule.verifies_from is not None and how.version not in self._kept.weights:
            self._kept.keep_version(how.policy, how.version)
        self._session = session = how.session
        self._round = self._runner.begin(session, how.rule, how.number, how.version, hooks, AHEAD)
        session.in_background(self._round.decode)

    def wait(self) -> None:
        """Wait until the rollout in the background has ended, if there is one.

        The round is then kept until `clear`.
        """
        if self._session is None or self._round is None:
            return
        began = time.perf_counter()
        try:
            self._session.wait()
        except Exception:
            self.abandon()
            raise
        waited = time.perf_counter() - began
        self._drawn = self._round.harvest()
        self._session = self._round = None
        seconds = self._drawn.metrics["time/rollout"]
        self._metrics = {
            "async_rollout/rollout_seconds": seconds,
            "async_rollout/wait_seconds": waited,
        }

    def take(self) -> tuple[DrawnRound | None, dict[str, float]]:
        """Return the round, if one was drawn, and metrics of the rollout.

        They are kept until `clear`, in case the round is interrupted.
        """
        self.wait()
        return self._drawn, self._metrics

    def clear(self) -> None:
        """Forget the round that was taken."""
        self._drawn, self._metrics = None, {}

    def abandon(self) -> None:
        """Forget a rollout that has not ended; its prompts stay in the pool."""
        self._session = self._round = None

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
        """Return the round, as primitives and tensors. It must be over."""
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
