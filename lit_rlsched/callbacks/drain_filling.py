"""Slots that idle at the end of a round begin the next one."""

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, rollout_schedule
from lit_rlsched.run.checks import check_logprobs


class DrainFilling(RolloutCallback):
    """Begin prompts of the next round in slots that a round leaves free at its end.

    While the last completions of a round decode, free slots begin completions of the next round as
    drafts. The next round verifies them under its own policy, keeps a prefix of each, and draws the
    rest (block verification, arXiv 2403.10444). `SortedBatching` and `TailBatching` may end a round
    at any time, so drafts are started only for prompts that are certain to be in a later round.

    Bias: none of its own, up to the difference between engine and trainer. With `TailBatching` and
    `SortedBatching` prompts with a draft are ahead of others, and the first to finish are trained
    on first (`rollout/trained_over_drawn_length`). The engine may be in the trainer's process. Each
    version that has drafts costs a copy of the trainable weights in CPU memory and in checkpoints.

    See `docs/explanation/drain_filling.md`.

    Raises:
        ValueError: drafts cannot be verified because the engine's log-probs are not those of the
            policy, or another callback cannot work with this one.

    Example::

        Trainer(callbacks=[DrainFilling()])
    """

    sets = "what free slots decode"

    def describe(self) -> str:
        """Return the settings in words."""
        return "slots that are free at the end of a round begin the next one; it verifies them"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switch it on in the schedule."""
        schedule, run = rollout_schedule(trainer, self)
        given = run.settings
        check_logprobs("`DrainFilling`", given.engine, given.sampling, "drafts are verified by")
        schedule.fills_drain = True
