"""New weights go into a rollout that runs, after each optimizer step."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.callbacks.ahead_rollout import AheadRollout
from lit_rlsched.callbacks.rollout_callback import rollout_schedule, run_of
from lit_rlsched.rollout.meetings import recorded_turns
from lit_rlsched.scheduling.in_flight_updates import (
    OWNER,
    Cache,
    InFlight,
    Pace,
    TooOld,
    WindowedRound,
)
from lit_rlsched.settings import check_count
from lit_rlsched.training.round import Round
from lit_rlsched.training.round_metrics import cache_divergence


class InFlightUpdates(AheadRollout):
    """Decode and train at the same time, and give the engine new weights while completions go on.

    The next round is drawn while the current one is trained on, as with
    `AheadRollout(correction="importance")`. After each optimizer step the new weights go into the
    running rollout, between two turns (decode steps of all engines), so a completion has tokens of
    several policies, each with its log-prob and policy version. A round ends as soon as the prompts
    of an update are ready; the others go on in the next one. Tokens are trained on as in
    `SortedBatching(mode="partial")`: the ratio to the policy that drew each token is clipped or, in
    RLOO and with `old_logprobs="trainer"`, weighted as `importance_sampling_mode` says.

    Bias: clipped ratios of stale tokens, and within the window short completions are trained on
    earlier than long ones, which are older when they are; every completion that was begun is
    trained on. Nothing is biased by `cache="recompute"`. With `cache="keep"` tokens after an update
    are drawn by neither policy, since they attend to keys and values of older weights: the recorded
    log-probs are those that they were drawn with, but no trainer can reproduce them
    (`in_flight/cache_kl` shows by how much).

    How old tokens get is bounded where prompts are admitted: at most `prompts_in_flight` decode at
    the same time (AReaL's capacity), and none is overtaken by more later ones than `max_staleness`
    allows (windowed FIFO). A completion that is older all the same, such as after a change of the
    settings, is restarted at the start of a round or, if it is finished, dropped and counted in
    `dropped/stale`. With `too_old="verify"` no prompt has to wait for its turn: before a round, the
    trainer verifies all tokens of completions that would have one that is too old, each against
    the policy that drew it (block verification, arXiv 2403.10444). What is kept counts as drawn by
    the newest policy.

    With `pace="turns"` what is drawn follows from weights and seeds alone, and runs repeat bit for
    bit. A checkpoint, a validation and SIGTERM let the round that is being drawn end without more
    updates, which at the end of a round changes nothing. So a resumed run equals one that was not
    interrupted and wrote the same checkpoints in the middle of rounds.

    Each round logs `in_flight/updates`, `in_flight/engine_wait_seconds`,
    `in_flight/trainer_wait_seconds` (how long each waited for the other), `staleness/*`,
    `rollout/trained_over_drawn_length`, and `ahead_rollout/*`.

    Args:
        pace: With `turns`, the weights of the i-th optimizer step of a round go in at turn
            `i * turns` of the next one, unless that ends before: rollout and trainer wait for each
            other there. With `free` they go in at the next multiple of `turns` once they are there,
            so what is drawn depends on timing.
        cache: `recompute` reads prompt and tokens of each running completion anew under the new
            weights, which costs a prefill. `keep` goes on with the keys and values of the old ones.
        turns: See `pace`.
        max_staleness: Maximum age of a trained token in rounds (at the start of the update).
        too_old: With `wait`, a round does not end before the prompts that would get too old are
            ready. With `verify` it does, and they are verified, at the cost of a forward pass over
            them, and of a copy of the trainable weights in CPU memory and in checkpoints of each
            version that has tokens: `max_staleness` times the optimizer steps of a round, and one.
        prompts_in_flight: Prompts that decode at the same time; from `prompts_per_round` to
            `max_staleness` times as many, or more if what is too old is verified. More keep the
            engine fuller, fewer widen the window. By default half a round less than
            `max_staleness` rounds of prompts, and with `verify` one and a half rounds at least.
        replay: Folder `traces` of a run with `pace="free"` and `RolloutLogger(save_trace=True)`:
            weights change at the turns at which they did there. With the same settings and
            checkpoints the run is the same, bit for bit.

    Raises:
        ValueError: an argument is out of range, or `replay` has no traces.
        MisconfigurationException: the engine is in the trainer's process, it cannot `keep` its
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
        check_count(OWNER, "max_staleness", max_staleness, 1, "At 0, leave the callback out.")
        self.max_staleness, self.prompts_in_flight = max_staleness, prompts_in_flight
        self._version = 0

    def describe(self) -> str:
        """Return the settings in words."""
        return (
            "rollouts go on during the update and get its weights after each optimizer step; "
            f"tokens are at most {self.max_staleness} round{'s' * (self.max_staleness > 1)} old"
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put rule and settings into the schedule."""
        if stage != "fit":
            return
        schedule, run = rollout_schedule(trainer, self)
        given, engine = run.settings, run.settings.engine
        if self.settings.cache == "keep" and not engine.keeps_cache:
            raise MisconfigurationException(
                f"`{OWNER}(cache='keep')`: `{engine.name}` cannot go on with what older "
                "weights have cached, or would give it to other requests. Use `cache='recompute'`."
            )
        size, steps = given.prompts_per_round, given.steps_per_epoch
        prompts, too_old = self.prompts_in_flight, self.settings.too_old
        schedule.rule = WindowedRound(size, prompts, self.max_staleness, steps, too_old)
        schedule.in_flight = self.settings
        super().setup(trainer, pl_module, stage)

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
            if run.session.update(version) and self.settings.too_old == "verify":
                run.rounds.drafts.keep_version(run.startup.policy, version)

        run.lead(update)
