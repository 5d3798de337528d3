"""Rewards to advantages, one row per prompt group. NaN marks a completion that could not be scored.

An unscorable completion gets advantage 0 and stays out of its group's baseline; so does the only
scorable completion of a group, or of a batch, which has nothing to be compared with.
"""

from typing import Literal

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]

# Keeps a group of equal rewards from being divided by zero; the same value as TRL.
STD_EPSILON = 1e-4


def combine_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Add up a completion's scores: `r_i = sum_k w_k r_ik` over the functions `k` that gave one.

    Args:
        rewards: `[N, F]`, one column per reward function, NaN where a function gave no score.
        weights: `[F]`.

    Returns:
        `[N]`; NaN where no function gave a score, which is not the same as a reward of 0.
    """
    unscorable = rewards.isnan().all(dim=1)
    return (rewards * weights).nansum(dim=1).masked_fill(unscorable, torch.nan)


def kl_in_reward(
    rewards: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float
) -> Tensor:
    """Charge a completion for leaving the reference: `r_i - beta * sum_t (logp_it - ref_logp_it)`.

    The k1 estimate of the sequence's KL divergence, in the reward as in RLOO (arXiv 2402.14740).

    Args:
        rewards: `[N]`.
        logp: `[N, C]`, log-probabilities under the policy that drew the completions.
        ref_logp: `[N, C]`, the same tokens under the reference model.
        mask: `[N, C]`, non-zero on the completion's tokens.
        beta: weight of the penalty.

    Returns:
        `[N]`.
    """
    return rewards - beta * (logp - ref_logp).masked_fill(mask == 0, 0.0).sum(dim=1)


def group_relative(rewards: Tensor, scale_rewards: ScaleRewards = "group") -> Tensor:
    """GRPO's advantage (arXiv 2402.03300): `A = (r - mean) / (std + 1e-4)`, mean over the group.

    Args:
        rewards: `[P, G]`, one row per prompt.
        scale_rewards: whose (Bessel-corrected) standard deviation divides: each group's own, the
            whole batch's, or none at all (Dr. GRPO, arXiv 2503.20783).

    Returns:
        `[P, G]`.

    Raises:
        ValueError: if a group has fewer than two completions or `scale_rewards` is unknown.
    """
    _check_groups(rewards)
    advantages = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (_nanstd(rewards) + STD_EPSILON)
    elif scale_rewards == "batch":
        advantages = advantages / (_nanstd(rewards.reshape(1, -1)) + STD_EPSILON)
    elif scale_rewards != "none":
        raise ValueError(
            f"`scale_rewards={scale_rewards!r}` is unknown. Use 'group', 'batch' or 'none'."
        )
    return advantages.nan_to_num(nan=0.0)


def leave_one_out(rewards: Tensor, normalize: bool = False) -> Tensor:
    """RLOO's advantage (arXiv 2402.14740): `A_i = r_i - mean of the other completions' rewards`.

    Args:
        rewards: `[P, G]`, one row per prompt.
        normalize: standardise the advantages over the whole batch (TRL's `normalize_advantages`).

    Returns:
        `[P, G]`.

    Raises:
        ValueError: if a group has fewer than two completions.
    """
    _check_groups(rewards)
    others = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1
    # One scorable completion: 0 / 0, so NaN, so advantage 0.
    advantages = rewards - (rewards.nansum(dim=1, keepdim=True) - rewards) / others
    if normalize:
        # No mean to subtract: each group's advantages sum to zero.
        advantages = advantages / (_nanstd(advantages.reshape(1, -1)) + STD_EPSILON)
    return advantages.nan_to_num(nan=0.0)


def batch_normalized(rewards: Tensor) -> Tensor:
    """REINFORCE++'s advantage (arXiv 2501.03262): `A = (R - mean) / (std + 1e-4)` over the batch.

    As in SortedRL (arXiv 2603.23414, equation 3), over the completions that are trained on
    together: what is in the batch decides what an advantage is, and a prompt needs no siblings.

    Args:
        rewards: `[P, G]`.

    Returns:
        `[P, G]`.
    """
    advantages = (rewards - rewards.nanmean()) / (_nanstd(rewards.reshape(1, -1)) + STD_EPSILON)
    return advantages.nan_to_num(nan=0.0)


def _check_groups(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"Rewards of shape {list(rewards.shape)} give no completion a sibling to be compared "
            "with: expected [prompts, num_generations]. Set `num_generations` to 2 or more."
        )


def _nanstd(values: Tensor) -> Tensor:
    """Bessel-corrected standard deviation of each row's numbers: `[P, G]` to `[P, 1]`."""
    deviations = values - values.nanmean(dim=1, keepdim=True)
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    return (deviations.square().nansum(dim=1, keepdim=True) / (count - 1)).sqrt()
