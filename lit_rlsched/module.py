"""GRPO and RLOO as LightningModules: two presets of one policy-gradient module."""

from typing import Any, Literal

from torch import Tensor

from lit_rlsched.policy_module import PolicyModule
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
        model: See `PolicyModule`, which takes all further arguments too.
        advantage: What a reward is compared with: `group`, those of the prompt's other completions
            (GRPO); `reinforce++`, those of all completions of the update, by mean and standard
            deviation (REINFORCE++, arXiv 2501.03262). That needs no siblings: `num_generations` may
            be 1, and `SortedBatching` trains on single completions.
        scale_rewards: What advantages are divided by: the `group`'s standard deviation, that of
            the whole `batch`, or `none` (Dr. GRPO).
        **kwargs: See `PolicyModule`.

    Raises:
        ValueError: an argument is out of range, or two contradict each other.

    Example::

        module = GRPOModule("Qwen/Qwen3-0.6B", learning_rate=1e-6, loss_type="dapo")
    """

    def __init__(
        self,
        model: str,
        *,
        advantage: Literal["group", "reinforce++"] = "group",
        scale_rewards: Literal["group", "batch", "none"] = "group",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        if advantage not in ("group", "reinforce++"):
            raise ValueError(f"`{advantage=}` is unknown. Use 'group' or 'reinforce++'.")
        if advantage == "reinforce++" and scale_rewards != "group":
            raise ValueError(
                f"`{scale_rewards=}` has no effect on `advantage='reinforce++'`, which divides by "
                "the standard deviation of the update. Leave it out."
            )

    def streaming_obstacle(self) -> str | None:
        """Advantages that are compared with the whole update are known when it is."""
        if not self.needs_group:
            return (
                "`advantage='reinforce++'` compares rewards with those of all the update, which "
                "are known at its end. Use `advantage='group'`"
            )
        if self._hp.scale_rewards == "batch":
            return (
                "`scale_rewards='batch'` divides by the standard deviation of all the update, "
                "which is known at its end. Use 'group' or 'none'"
            )
        return super().streaming_obstacle()

    @property
    def needs_group(self) -> bool:
        """Whether a completion's advantage is relative to its siblings."""
        return self._hp.advantage == "group"

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Relative to the group or to the update; the KL stands in the loss."""
        if not self.needs_group:
            return batch_normalized(rewards)
        return group_relative(rewards, self._hp.scale_rewards)


class RLOOModule(PolicyModule):
    """REINFORCE Leave-One-Out (arXiv 2402.14740).

    Args:
        model: See `PolicyModule`, which takes all further arguments too.
        beta: Weight of the KL to the reference model, as a penalty in the reward.
        loss_type: See `losses.policy_loss`.
        normalize_advantages: Whether advantages are normalised over the round.
        **kwargs: See `PolicyModule`.
    """

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

    kl_in_loss = False

    def streaming_obstacle(self) -> str | None:
        """Advantages that are normalised over the round are known when it is over."""
        if self._hp.normalize_advantages:
            return (
                "`normalize_advantages=True` needs the advantages of all the update, which are "
                "known at its end. Leave it out"
            )
        return super().streaming_obstacle()

    @property
    def skip_zero_advantage(self) -> bool:
        """Nothing but the advantage carries gradient."""
        return True

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Leave-one-out, of rewards less `beta` times the k1 estimate of the KL."""
        if logprobs is not None:
            penalised = kl_in_reward(
                rewards.flatten(), logprobs.old, logprobs.ref, logprobs.mask, beta=self._hp.beta
            )
            rewards = penalised.view_as(rewards)
        return leave_one_out(rewards, self._hp.normalize_advantages)
