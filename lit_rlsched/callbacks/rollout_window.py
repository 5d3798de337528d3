"""Prompts of later rounds are drawn while a round ends, or while it is trained on."""

import math
import sys
from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.scheduling.rollout_window import TooOld, WindowRound, most_overtakes
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule

ROUNDS = 3
"""Rounds of prompts in flight by default: a fourth one gains little where none overtakes."""


class RolloutWindow(RolloutCallback):
    """Keep the slots filled with prompts of later rounds, and verify what they have when it is old.

    Three rounds of prompts are in flight. A round trains on the oldest `prompts_per_round` of them;
    while its last completions decode, the others use the slots that are free. When the next round
    begins, the trainer verifies every token of an older policy: it keeps the prefix that the newest
    policy would have drawn (block verification, arXiv 2403.10444), and the engine draws the rest.
    No token that is trained on is stale, and the engine need not decode beside the update.

    Bias: none with `overtake=0`, up to the difference between engine and trainer: the order of the
    data decides what is in an update. With more, a round takes the oldest prompts that are ready,
    so updates see short completions earlier than long ones
    (`rollout/trained_over_drawn_length`). Every prompt that was begun is trained on.

    See `docs/explanation/rollout_window.md`.

    Args:
        prompts_in_flight: Prompts that are begun and not trained on. By default three rounds of
            them, or as many as the data hold. As many completions decode as those of one round;
            `MicroGroupSampling(slots=...)` changes it.
        overtake: Rounds of later prompts that may be trained on before a prompt. 2 is faster than
            0, and biased.

    Raises:
        UsageError: an argument is out of range, tokens cannot be verified (the engine's log-probs
            are not those of the policy, the strategy shards it, sampling is truncated), or another
            callback cannot work with this one.

    A copy of the trainable weights that drew the tokens is kept in CPU memory and in checkpoints.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[RolloutWindow(), StreamedTraining()])
    """

    sets = "when a round ends"

    def __init__(self, prompts_in_flight: int | None = None, overtake: float = 0) -> None:
        self.prompts_in_flight, self.overtake = prompts_in_flight, overtake

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule."""
        size, prompts = facts.settings.prompts_per_round, self.prompts_in_flight
        if prompts is not None and prompts < size:
            raise UsageError(
                f"`RolloutWindow(prompts_in_flight={prompts})`: an update has {size} prompts. Use "
                f"{size} or more."
            )
        fewer, prompts = prompts is None, prompts or ROUNDS * size
        schedule.rule = WindowRound(size, prompts, math.floor(self.overtake * size), fewer=fewer)
        schedule.compares_logprobs["`RolloutWindow`"] = "drafts are verified by"


class AsyncRollout(RolloutCallback):
    """Draw the next round while the current one is trained on, and train on tokens of some age.

    Engine and trainer work at the same time, as in AReaL (arXiv 2505.24298), PipelineRL
    (arXiv 2509.19128) and prime-rl. At the end of a round the engine gets the newest weights, and
    what is unfinished goes on under them. So completions have tokens of several policies, with the
    log-probs and the versions of those that drew them. A round takes the oldest prompts that are
    ready. `AsyncRollout(1, prompts_per_round, "wait")` is one step off, as in verl.

    Bias: clipped ratios of stale tokens (`staleness/*`). Short completions are trained on earlier
    than long ones, which are older by then (`rollout/trained_over_drawn_length`); every prompt that
    was begun is trained on. With `verify` the age is bounded and the overtaking is not, with `wait`
    both are. Runs repeat bit for bit, with tools if `tool_steps` is set.

    See `docs/explanation/asynchronous.md`.

    Args:
        max_staleness: Maximum age of a trained token in rounds (at the start of the update).
        prompts_in_flight: Prompts that are begun and not trained on. By default
            `max_staleness + 1` rounds of them with `verify` (fewer where the data hold fewer), and
            half a round less than `max_staleness` rounds with `wait`, one at least. As many
            completions decode as those of one round; `MicroGroupSampling(slots=...)` changes it.
        too_old: What becomes of prompts with tokens that would be older. With `verify` the trainer
            keeps the prefix that the newest policy would have drawn, which costs a forward pass
            over them and a copy of the trainable weights, in CPU memory and in checkpoints, of each
            of up to `max_staleness + 1` versions that have tokens. With `wait` no prompt is
            overtaken so often that it gets too old. By default `verify`, unless a strategy shards
            the policy.

    Raises:
        UsageError: an argument is out of range, the engine is in the trainer's process or gives no
            log-probs, or another callback cannot work with this one.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[AsyncRollout()])
    """

    sets = "when a round ends"

    def __init__(
        self,
        max_staleness: int = 2,
        prompts_in_flight: int | None = None,
        too_old: TooOld | None = None,
    ) -> None:
        self.max_staleness, self.prompts_in_flight = max_staleness, prompts_in_flight
        self.too_old = too_old
        self._trainer: Trainer | None = None

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule, and that rounds are drawn beside the update."""
        if not facts.trains:
            return
        settings, most, prompts = facts.settings, self.max_staleness, self.prompts_in_flight
        size, steps = settings.prompts_per_round, settings.steps_per_epoch
        verifies = self.too_old == "verify" or (self.too_old is None and facts.sharded is None)
        fewer = prompts is None
        if prompts is None:
            prompts = (most + 1) * size if verifies else max(size, most * size - size // 2)
        if prompts < size or (prompts > most * size and not verifies):
            upwards = "or more" if verifies else f"to {most * size}, or a larger `max_staleness`"
            raise UsageError(
                f"`AsyncRollout(prompts_in_flight={prompts}, max_staleness={most})`: with an "
                f"update of {size} prompts use {size} {upwards}."
            )
        schedule.rule = WindowRound(
            size,
            prompts,
            sys.maxsize if verifies else most_overtakes(most, size, prompts),
            max_staleness=most * steps,
            verifies_from=(most - 1) * steps + 1 if verifies else None,
            fewer=fewer,
        )
        schedule.ahead = True
        who = "`AsyncRollout`"
        schedule.beside_update.append(who)
        schedule.compares_logprobs[who] = "tokens are trained against"
        schedule.trains_on_stale = who

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go first, so that hooks come before other callbacks' states are saved."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._trainer = trainer
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.remove(self)
            callbacks.insert(0, self)

    def state_dict(self) -> dict[str, Any]:
        """Wait for the rollout beside the update; there is no state."""
        if self._trainer is not None:
            run_of(self._trainer, self).wait_for_rollout()
        return {}
