"""Rounds are drawn while the round before them is trained on."""

from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.scheduling.ahead_rollout import Correction
from lit_rlsched.scheduling.streamed_training import Streaming
from lit_rlsched.training.schedule import RunFacts, Schedule


class AheadRollout(RolloutCallback):
    """Draw the next round while the current one is trained on.

    Engine and trainer work at the same time, so a round takes about as long as the slower of
    rollout and update, instead of their sum. The policy at the start of the current update draws
    the next round, which is trained on one round later. Runs repeat bit for bit.

    Bias: `verify` has none, up to the difference between engine and trainer. `importance` has
    clipped ratios and stale completions (`staleness/*`). The engine must decode in its own process
    (`ProcessEngine`, `RayEngine` or several engines), and needs its memory during the update too.

    See `docs/explanation/ahead_rollout.md`.

    Args:
        correction: `verify` keeps a prefix of each completion, as the newest policy would have
            drawn it, and draws the rest (block verification, arXiv 2403.10444), for a copy of the
            trainable weights and forward passes over what is cut. Where it can, the pass of the
            update verifies. `importance` trains on completions as they are.

    Raises:
        UsageError: `correction` is neither, or drafts cannot be verified because the engine's
            log-probs are not those of the policy.
        UsageError: the engine is in the trainer's process, or another callback
            cannot work with this one.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[AheadRollout()])
    """

    sets = "when the next round is drawn"

    def __init__(self, correction: Correction = "verify") -> None:
        self.correction = correction
        self._trainer: Trainer | None = None

    def describe(self) -> str:
        """Return the settings in words."""
        how = "verified" if self.correction == "verify" else "corrected by importance sampling"
        return f"the next round is drawn during the update, and {how}"

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the correction; verified drafts are streamed where gradients of parts can be."""
        if not facts.trains:
            return
        stale = self.correction == "importance"
        schedule.ahead = self.correction
        schedule.beside_update.append(f"`{type(self).__name__}`")
        why = "tokens are trained against" if stale else "drafts are verified by"
        schedule.compares_logprobs[self._who] = why
        if stale:
            schedule.trains_on_stale = self._who
        elif facts.streaming_obstacle() is None:
            schedule.streaming = schedule.streaming or Streaming()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go first, so that hooks come before other callbacks' states are saved."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._trainer = trainer
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.remove(self)
            callbacks.insert(0, self)

    @property
    def _who(self) -> str:
        """Name of the callback in messages."""
        return f"`AheadRollout(correction={self.correction!r})`"

    def state_dict(self) -> dict[str, Any]:
        """Wait for the rollout beside the update; there is no state."""
        if self._trainer is not None:
            run_of(self._trainer, self).wait_for_rollout()
        return {}
