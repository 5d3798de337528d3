"""GRPO and RLOO as LightningModules."""

from typing import Any, Literal

from torch import Tensor

from lit_rlsched.run.policy_module import PolicyModule
from lit_rlsched.settings import UsageError
from lit_rlsched.training.advantages import (
    batch_normalized,
    group_relative,
    kl_in_reward,
    leave_one_out,
)
from lit_rlsched.training.learner import RoundLogprobs
from lit_rlsched.training.losses import LossType

__all__ = ["GRPOModule", "PolicyModule", "RLOOModule"]


class GRPOModule(PolicyModule):
    """Group Relative Policy Optimization (arXiv 2402.03300) and its relatives.

    Args:
        model: Folder or hub name of the initial checkpoint.
        advantage: The baseline of a reward. `group`: the rewards of the prompt's completions
            (GRPO). `reinforce++`: mean and standard deviation over all completions of the update
            (REINFORCE++, arXiv 2501.03262). `tracker`: the decayed mean of the prompt's earlier
            rewards; what is left is standardised over the update (SPO, arXiv 2509.13232; the mean
            decays with the prompt's completions, not with the policy's KL). The last two allow
            `num_generations=1`, with which nothing waits for a group, and let `SortedBatching`
            train on single completions.
        scale_rewards: Divisor of advantages: the standard deviation of the `group` or of the whole
            `batch`, or `none` (Dr. GRPO). As in TRL, true is `group` and false is `none`.
        **kwargs: See `PolicyModule`.

    Raises:
        UsageError: If an argument is out of range, or two contradict each other.

    Example::

        module = GRPOModule("Qwen/Qwen3-0.6B", learning_rate=1e-6, loss_type="dapo")
    """

    def __init__(
        self,
        model: str,
        *,
        advantage: Literal["group", "reinforce++", "tracker"] = "group",
        scale_rewards: Literal["group", "batch", "none"] | bool = "group",
        **kwargs: Any,
    ) -> None:
        if isinstance(scale_rewards, bool):
            scale_rewards = "group" if scale_rewards else "none"
        super().__init__(model, **kwargs)
        if advantage != "group" and scale_rewards != "group":
            raise UsageError(
                f"`{scale_rewards=}` has no effect on `{advantage=}`, which divides by the "
                "standard deviation of the update. Leave it out."
            )

    def streaming_obstacle(self) -> str | None:
        if not self.needs_group:
            return (
                f"`advantage='{self.hparams.advantage}'` compares rewards with those of the whole "
                "update, which are known only at its end. Use `advantage='group'`"
            )
        if self.hparams.scale_rewards == "batch":
            return (
                "`scale_rewards='batch'` divides by the standard deviation of the whole update, "
                "which is known only at its end. Use 'group' or 'none'"
            )
        return super().streaming_obstacle()

    @property
    def needs_group(self) -> bool:
        return self.hparams.advantage == "group"

    @property
    def tracks_rewards(self) -> bool:
        return self.hparams.advantage == "tracker"

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        if not self.needs_group:
            return batch_normalized(rewards)
        return group_relative(rewards, self.hparams.scale_rewards)


class RLOOModule(PolicyModule):
    """REINFORCE Leave-One-Out (arXiv 2402.14740).

    Args:
        model: Folder or hub name of the initial checkpoint.
        beta: Weight of the KL to the reference model, subtracted from the reward.
        loss_type: See `losses.policy_loss`.
        normalize_advantages: Whether to normalise advantages over the round.
        **kwargs: See `PolicyModule`.
    """

    kl_in_loss = False

    def __init__(
        self,
        model: str,
        *,
        beta: float = 0.05,
        loss_type: LossType = "rloo",
        normalize_advantages: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, beta=beta, loss_type=loss_type, **kwargs)

    def streaming_obstacle(self) -> str | None:
        if self.hparams.normalize_advantages:
            return (
                "`normalize_advantages=True` needs the advantages of the whole update, which are "
                "known only at its end. Leave it out"
            )
        return super().streaming_obstacle()

    @property
    def skip_zero_advantage(self) -> bool:
        return True  # the KL is part of the advantage

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        if logprobs is not None:
            flat, beta = rewards.flatten(), self.hparams.beta
            penalised = kl_in_reward(flat, logprobs.old, logprobs.ref, logprobs.mask, beta=beta)
            rewards = penalised.view_as(rewards)
        return leave_one_out(rewards, self.hparams.normalize_advantages)
