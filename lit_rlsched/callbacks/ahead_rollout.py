"""Rounds are drawn while the round before them is trained on."""

from typing import Any, get_args

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.callbacks.rollout_callback import (
    RolloutCallback,
    rollout_schedule,
    run_of,
)
from lit_rlsched.callbacks.streamed_training import streaming_obstacle
from lit_rlsched.run.checks import check_decodes_by_itself, check_logprobs, warn_of_correction
from lit_rlsched.run.schedule import RunFacts
from lit_rlsched.scheduling.ahead_rollout import Correction
from lit_rlsched.scheduling.streamed_training import Streaming


class AheadRollout(RolloutCallback):
    """Draw the next round while the current one is trained on.

    Engine and trainer work at the same time, so a round takes about as long as the slower of
    rollout and update, instead of their sum. The next round is drawn by the policy at the start of
    the current update, which is one round older than the one that it trains. `correction` says what
    is done about that:

    * `verify`: the completions are drafts. Before the update that uses them, the trainer verifies
      all of them with a forward pass, keeps a prefix of each, and the engine draws the rest (block
      verification, arXiv 2403.10444). The result is distributed as if the newest policy had drawn
      all of it, up to the difference between engine and trainer. Rewards are computed afterwards,
      or during the update if the draft is then kept whole.
      Slots that are free meanwhile begin the drafts of the round after it, and the trainer
      computes gradients of groups that are whole, as with `StreamedTraining`. It does not if the
      engine would wait meanwhile, if `steps_per_round` is above 1, if the module optimizes
      automatically, or if advantages or loss need the whole update.
    * `importance`: they are trained on as they are, as in `SortedBatching(mode="partial")`: with
      the clipped ratio relative to the policy that drew them or, in RLOO and with
      `old_logprobs="trainer"`, weighted as `importance_sampling_mode` says. Bias: clipping and
      stale completions; `staleness/*` shows the age of the tokens in optimizer steps.

    What is drawn follows from weights and seeds, not from timing: runs repeat bit for bit, and a
    resumed run equals one that was not interrupted. A checkpoint, a validation and SIGTERM wait
    until the rollout beside the update has ended. The last round of a run draws nothing ahead, and
    a run that ends for another reason (`max_time`, early stopping) drops the round that it was
    drawing, so a run that is continued beyond its end differs from one that was longer from the
    start.

    The engine must decode in its own process: `ProcessEngine(engine=VLLMEngine())`, several engines
    or `RayEngine`. It needs its memory during the update too. `verify` keeps a copy of the
    trainable weights in CPU memory and in checkpoints. Hooks of completions and groups that were
    drawn ahead are called when the update before them has ended.

    Each round logs `ahead_rollout/rollout_seconds` (time of the rollout beside the update) and
    `ahead_rollout/wait_seconds` (how long the trainer waited for its end); with `verify` also
    `ahead_rollout/tokens`, `ahead_rollout/rewards_kept`, `rollout/draft_tokens`, `drafts/*`,
    `time/drafts` and `streamed_training/*`.

    Args:
        correction: `verify` or `importance`.

    Raises:
        ValueError: `correction` is neither, or drafts cannot be verified because the engine's
            log-probs are not those of the policy.
        MisconfigurationException: the engine is in the trainer's process, or another callback
            cannot work with this one.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[AheadRollout()])
    """

    sets = "when the next round is drawn"

    def __init__(self, correction: Correction = "verify") -> None:
        if correction not in get_args(Correction):
            raise ValueError(
                f"`AheadRollout({correction=})`: must be one of {', '.join(get_args(Correction))}."
            )
        self.correction = correction
        self._trainer: Trainer | None = None

    def describe(self) -> str:
        """Return the settings in words."""
        how = "verified" if self.correction == "verify" else "corrected by importance sampling"
        return f"the next round is drawn during the update, and {how}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the correction into the schedule."""
        if stage != "fit":
            return
        schedule, run = rollout_schedule(trainer, self)
        check_decodes_by_itself(f"`{type(self).__name__}`", run.settings.engine)
        who, what = self._who, "drafts are verified by"
        if self.correction == "importance":
            what = "tokens are trained against"
            self._check_importance(who, run)
            warn_of_correction(who, pl_module.hparams)
        elif streaming_obstacle(pl_module, run) is None:
            schedule.streaming = schedule.streaming or Streaming()
        check_logprobs(who, run.settings.engine, run.settings.sampling, what)
        schedule.ahead = self.correction
        self._trainer = trainer
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)  # first, so that hooks come before other callbacks' states are saved
        callbacks.insert(0, self)

    @property
    def _who(self) -> str:
        """Name of the callback in messages."""
        return f"`AheadRollout(correction={self.correction!r})`"

    def _check_importance(self, who: str, run: RunFacts) -> None:
        if "StreamedTraining" in run.callbacks:
            raise MisconfigurationException(
                f"{who} with `StreamedTraining`: a round is drawn before the update that it would "
                "be part of begins. Use `correction='verify'`, or remove one of them."
            )

    def state_dict(self) -> dict[str, Any]:
        """Wait for the rollout beside the update; there is no state."""
        if self._trainer is not None:
            run_of(self._trainer, self).wait_for_rollout()
        return {}
