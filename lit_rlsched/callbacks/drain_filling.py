"""Slots that idle at the end of a round begin the next one."""

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, rollout_schedule
from lit_rlsched.run.checks import check_logprobs


class DrainFilling(RolloutCallback):
    """Begin prompts of the next round in slots that a round leaves free at its end.

    While the last completions of a round decode, more and more slots idle. With this callback they
    begin completions of the next round, as drafts, which end with the round, with the tokens that
    they have. Before the next round decodes, a forward pass of the trainer verifies each draft
    under the new policy, keeps a prefix of it, and the engine draws the rest (block verification,
    arXiv 2403.10444). The result is distributed as if the newest policy had drawn all of it, up to
    the difference between engine and trainer: the end of a round cuts drafts without looking at
    what comes later in them, and each draft that was begun is verified. Completions of the round
    never wait for a draft.

    A validation between two rounds has the weights of the next one: slots that it leaves free begin
    that round too, and its drafts are kept whole.

    The engine may be in the trainer's process. `AheadRollout` also decodes during the update, and
    needs an engine that does so by itself.

    With `SortedBatching` and `TailBatching`, which may end a round at any time, drafts begin of
    prompts that are in a later round whatever this one leaves: those of the pool that it does not
    decode, and the next ones of the data. With several engines slots are filled only in rounds in
    which each completion has a slot.

    Bias: none of its own. With `TailBatching` and `SortedBatching` prompts with a draft are ahead
    of others in the next round, and those that finish first are trained on first:
    `rollout/trained_over_drawn_length` measures what these rules select.

    A step of an engine takes longer the more requests run in it, most of all on a CPU. A policy
    version that has drafts costs a copy of the trainable weights in CPU memory and in checkpoints.
    The last round of a run begins no drafts.

    Each round logs `rollout/draft_tokens`, `rollout/drafts_begun` and, where it verifies drafts,
    `drafts/*` and `time/drafts`.

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
