"""New weights go into a rollout that runs, after each optimizer step."""

from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.ahead_rollout import AheadRollout
from lit_rlsched.callbacks.rollout_callback import run_of
from lit_rlsched.rollout.meetings import recorded_turns
from lit_rlsched.run.saving.traces import warn_of_another_run
from lit_rlsched.scheduling.in_flight_updates import (
    OWNER,
    Cache,
    InFlight,
    Pace,
    TooOld,
    WindowedRound,
)
from lit_rlsched.training.round import Round
from lit_rlsched.training.round_metrics import cache_divergence
from lit_rlsched.training.schedule import RunFacts, Schedule


class InFlightUpdates(AheadRollout):
    """Decode and train at the same time, and give the engine new weights while completions go on.

    PipelineRL (arXiv 2509.19128) and AReaL (arXiv 2505.24298). The engine draws the next round
    during the update, and gets the weights of each optimizer step between two decode steps. So a
    completion has tokens of several policies. Later prompts may overtake a prompt only so often
    that it never exceeds `max_staleness`. If a completion is too old anyway, it is restarted.

    Bias: clipped ratios of stale tokens (`staleness/*`). Short completions are trained on earlier
    than long ones, which are older by then (`rollout/trained_over_drawn_length`); every completion
    that was begun is trained on. `cache="recompute"` adds no bias. With `cache="keep"` neither
    policy draws the tokens after an update, because they attend to keys and values of older weights
    (`in_flight/cache_kl`), and no trainer can reproduce their log-probs. The engine must decode in
    its own process.

    See `docs/explanation/in_flight_updates.md`.

    Args:
        pace: With `turns`, the weights of a round's i-th optimizer step go in at turn `i * turns`
            of the next, where rollout and trainer wait for each other. With `free`, they go in at
            the first multiple of `turns` after they are there: draws depend on timing.
        cache: `recompute` reads prompt and tokens of each running completion anew under the new
            weights, which costs a prefill. `keep` goes on with the keys and values of the old ones.
        turns: Turns between two updates of the weights. A turn is one decode step of all engines.
        max_staleness: Maximum age of a trained token in rounds (at the start of the update).
        too_old: With `wait`, a round waits for prompts that would get too old. With `verify`, the
            trainer verifies them, which costs a forward pass over them and a copy of the trainable
            weights, in CPU memory and in checkpoints, of each version that has tokens.
        prompts_in_flight: From `prompts_per_round` to `max_staleness` times as many (more with
            `verify`) decode at the same time. More keep the engine fuller, fewer widen the window.
            By default half a round below `max_staleness` rounds; with `verify` 1.5 rounds at least.
        replay: Folder of a run with `pace="free"` and `RolloutLogger`, to change weights at the
            same turns. With the same settings and checkpoints the run is the same, bit for bit.

    Raises:
        UsageError: an argument is out of range, or `replay` has no traces.
        UsageError: the engine is in the trainer's process, it cannot `keep` its
            cache, or another callback cannot work with this one.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[InFlightUpdates(max_staleness=2)])
    """

    def __init__(
        self,
        pace: Pace = "turns",
        cache: Cache = "recompute",
        turns: int = 32,
        max_staleness: int = 2,
        too_old: TooOld = "wait",
        prompts_in_flight: int | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__("importance")
        self.settings = InFlight(pace, cache, turns, recorded_turns(replay), too_old)
        self.max_staleness, self.prompts_in_flight = max_staleness, prompts_in_flight
        self.replay = replay
        self._version = 0

    def describe(self) -> str:
        """Return the settings in words."""
        return (
            "rollouts go on during the update and get its weights after each optimizer step; "
            f"tokens are at most {self.max_staleness} round{'s' * (self.max_staleness > 1)} old"
        )

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule, and when weights change."""
        if facts.trains:
            size, steps = facts.settings.prompts_per_round, facts.settings.steps_per_epoch
            prompts, too_old = self.prompts_in_flight, self.settings.too_old
            schedule.rule = WindowedRound(size, prompts, self.max_staleness, steps, too_old)
            schedule.in_flight = self.settings
            super().apply(schedule, facts)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Warn if the run to repeat had other settings."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.replay is not None:
            warn_of_another_run(run_of(trainer, self), self.replay, OWNER)

    @property
    def _who(self) -> str:
        return f"`{OWNER}`"

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Measure what `keep` does to the tokens of the newest policy."""
        run = run_of(trainer, self)
        if self.settings.cache == "keep":
            policy, temperature = run.startup.policy_reader, run.settings.sampling.temperature
            round.metrics |= cache_divergence(round, policy, temperature)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Give the engine the weights of a new optimizer step."""
        version, run = trainer.global_step, run_of(trainer, self)
        if version == self._version:
            return
        self._version = version

        def update() -> None:
            assert run.session is not None
            verifies = self.settings.too_old == "verify"
            run.rounds.overlap.update(run.session, run.startup.policy, version, verifies)

        run.lead(update)
