"""Slots that idle at the end of a round begin the next one."""

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.training.schedule import RunFacts, Schedule


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

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Switch it on."""
        schedule.fills_drain = True
        schedule.compares_logprobs["`DrainFilling`"] = "drafts are verified by"
