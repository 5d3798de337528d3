"""DAPO's dynamic sampling: replaces prompts that give no gradient."""

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.training.schedule import RunFacts, Schedule


class DynamicSampling(RolloutCallback):
    """Replace prompts whose completions all have the same reward by fresh prompts.

    Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2). If all rewards of a prompt are equal, or
    fewer than two completions have one, its advantages are zero. The next prompt of the data then
    takes its place in the same round, while other prompts still decode. A round ends with
    `prompts_per_round` useful prompts, or with fewer at the bound.

    Bias: prompts that are currently too easy or too hard are trained on less often than the data
    contains them; `dynamic_sampling/num_gen_batches` shows how many prompts a round drew.

    See `docs/explanation/pods.md`.

    Args:
        max_num_gen_batches: Bound on the prompts of a round, as a multiple of `prompts_per_round`
            (verl's name for it).

    Raises:
        UsageError: the bound is less than 2 or needs more prompts than `train_data` has, or the
            module's advantages are not relative to the prompt's other completions.

    Example::

        Trainer(callbacks=[DynamicSampling(max_num_gen_batches=4)])
    """

    sets = "which prompts are replaced"

    def __init__(self, max_num_gen_batches: int = 4) -> None:
        self.max_num_gen_batches = max_num_gen_batches

    def describe(self) -> str:
        """Return the settings in words."""
        return (
            "prompts whose completions all have the same reward are replaced; a round draws at "
            f"most {self.max_num_gen_batches} times its prompts"
        )

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the bound."""
        schedule.max_num_gen_batches = self.max_num_gen_batches
