"""Replaces prompts whose completions all have the same reward (DAPO)."""

from collections.abc import Sequence

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.down_sampling import informative
from lit_rlsched.training.round import Round, reward_matrix
from lit_rlsched.training.schedule import RunFacts, Schedule
from lit_rlsched.training.selection import drop
from lit_rlsched.types import Group


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
        self._prompts = 1
        self._schedule: Schedule | None = None

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Let `replaces` decide about complete groups."""
        schedule.replacement, self._prompts = self, facts.settings.prompts_per_round
        self._schedule = schedule

    def replaces(self, group: Group, due: int, prompts: int, weights: Sequence[float]) -> bool:
        """Whether another prompt takes the place of a complete group; if so, drop the group.

        Args:
            group: The group.
            due: Prompts that the round has drawn.
            prompts: Prompts that it trains on.
            weights: Of the reward functions.
        """
        compared = rewards = reward_matrix([group], weights).numpy()
        selection = self._schedule and self._schedule.selection
        if selection and not selection.full_scope:
            compared = selection.choices([group], rewards)
        if informative(compared[0]):
            return False
        drop(group, rewards[0], "uninformative")  # also where nothing replaces it
        return due < self.max_num_gen_batches * prompts

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log how many prompts the round has drawn, as a multiple of those that it trains on."""
        round.metrics["dynamic_sampling/num_gen_batches"] = len(round.groups) / self._prompts
