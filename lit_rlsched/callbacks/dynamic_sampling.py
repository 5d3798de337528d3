"""DAPO's dynamic sampling: prompts that teach nothing are replaced."""

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.settings import check_count


class DynamicSampling(RolloutCallback):
    """Replace prompts whose completions are all worth the same by fresh ones, in the same round.

    Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): where all of a prompt's rewards are
    equal there is no advantage, hence no gradient but that of the KL penalty; where too few rewards
    came back, neither. The next prompt of the data takes its place while others still decode. A
    round ends with `prompts_per_round` prompts that teach something, or at the bound with what
    there is. With `DownSampling` and a rule other than `max_variance`, what it selects of such a
    prompt may still be all the same, and is then left out of the update. When a prompt has all its
    completions, the round waits for their scores before its next decode step:
    so what it trains on, and when it decodes what, do not depend on how long reward functions take.

    What the method does to what is learned: prompts that are too easy or too hard at the moment are
    trained on less often than the data has them. The metrics of rewards and completions are of all
    that was drawn; `dynamic_sampling/num_gen_batches` says how many rounds' worth that was, and
    `dropped/uninformative` counts the completions that were left out since the run began.

    Args:
        max_num_gen_batches: Bound on the prompts of a round, as a multiple of `prompts_per_round`
            (verl's name for it).

    Raises:
        ValueError: it is less than 2, more than `train_data` can give, or the module's advantages
            are not relative to a prompt's own completions.

    Example::

        Trainer(callbacks=[DynamicSampling(max_num_gen_batches=4)])
    """

    sets = "which prompts are replaced"

    def __init__(self, max_num_gen_batches: int = 4) -> None:
        why = "With 1 nothing could be replaced."
        check_count("DynamicSampling", "max_num_gen_batches", max_num_gen_batches, 2, why)
        self.max_num_gen_batches = max_num_gen_batches

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the bound into the schedule."""
        schedule, run = rollout_schedule(trainer, self)
        if stage == "fit" and not run.learner.needs_group:
            raise ValueError(
                "`DynamicSampling` with an advantage that is relative to all of the update "
                "(`advantage='reinforce++'`): prompts whose completions are all worth the same do "
                "teach something there. Leave one of them out."
            )
        schedule.max_num_gen_batches = self.max_num_gen_batches
