"""Advantages from rewards `[P, G]`, with a row per group and NaN for a missing score.

A completion without a score gets advantage 0 and stays out of its group's baseline; so does the
only scored completion of a group. Statistics are computed in float64; an infinite reward counts as
missing.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlsched.settings import UsageError, check_choice

ScaleRewards = Literal["group", "batch", "none"]

# Avoids division by zero for equal rewards; TRL's value.
STD_EPSILON = 1e-4
LARGEST_REWARD = 1e15
"""A larger reward counts as infinite: an advantage of 1.8e19 overflows the gradient norm."""


def combine_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Sum the weighted scores of a completion: `r_i = sum_k w_k r_ik`, ignoring NaN."""
    unscorable = rewards.isnan().all(dim=1)
    return (rewards * weights).nansum(dim=1).masked_fill(unscorable, torch.nan)


def kl_in_reward(
    rewards: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float
) -> Tensor:
    """Subtract a KL penalty: `r_i - beta * sum_t (logp_it - ref_logp_it)`.

    The k1 estimate of the sequence's KL divergence, in the reward as in RLOO (arXiv 2402.14740).
    """
    return rewards - beta * (logp - ref_logp).masked_fill(mask == 0, 0.0).sum(dim=1)


def mean_kl(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of the KL estimate that `kl_in_reward` sums; 0 if there is no token."""
    tokens = (mask != 0).sum().clamp(min=1)
    return (logp - ref_logp).masked_fill(mask == 0, 0.0).sum() / tokens


def group_relative(rewards: Tensor, scale_rewards: ScaleRewards = "group") -> Tensor:
    """GRPO's advantage (arXiv 2402.03300): `A = (r - mean) / (std + 1e-4)`, mean over the group.

    Args:
        rewards: `[P, G]`, one row per prompt.
        scale_rewards: Divide by the Bessel-corrected standard deviation of the group, of the whole
            batch, or by none (Dr. GRPO, arXiv 2503.20783).

    Returns:
        `[P, G]`.

    Raises:
        UsageError: If a group has fewer than two completions or `scale_rewards` is unknown.
    """
    _check_groups(rewards)
    check_choice("group_relative", "scale_rewards", scale_rewards, get_args(ScaleRewards))
    exact = _exact(rewards)
    advantages = _deviations(exact)
    if scale_rewards != "none":
        spread = _nanstd(exact if scale_rewards == "group" else exact.reshape(1, -1))
        advantages = advantages / (spread + STD_EPSILON)
    return _zero_where_unscored(advantages).to(rewards.dtype)


def leave_one_out(rewards: Tensor, normalize: bool = False) -> Tensor:
    """RLOO's advantage (arXiv 2402.14740): `A_i = r_i - mean of the other completions' rewards`.

    Args:
        rewards: `[P, G]`, one row per prompt.
        normalize: Standardise advantages over the whole batch (TRL's `normalize_advantages`).

    Returns:
        `[P, G]`.

    Raises:
        UsageError: If a group has fewer than two completions.
    """
    _check_groups(rewards)
    exact = _exact(rewards)
    others = (~exact.isnan()).sum(dim=1, keepdim=True) - 1
    # A single score gives 0 / 0 = NaN, so advantage 0.
    above = _above_lowest(exact)
    advantages = above - (above.nansum(dim=1, keepdim=True) - above) / others
    if normalize:  # each group's advantages sum to zero, so there is no mean to subtract
        advantages = advantages / (_nanstd(advantages.reshape(1, -1)) + STD_EPSILON)
    return _zero_where_unscored(advantages).to(rewards.dtype)


def batch_normalized(rewards: Tensor) -> Tensor:
    """REINFORCE++'s advantage (arXiv 2501.03262): `A = (R - mean) / (std + 1e-4)` over the batch.

    As in SortedRL (arXiv 2603.23414, equation 3) the batch `[P, G]` holds all completions of the
    update, so an advantage depends on its composition; a group may have a single completion.
    """
    batch = _exact(rewards).reshape(1, -1)
    advantages = _deviations(batch) / (_nanstd(batch) + STD_EPSILON)
    return _zero_where_unscored(advantages).reshape(rewards.shape).to(rewards.dtype)


def standard_deviation(rewards: Tensor) -> Tensor:
    """Bessel-corrected standard deviation of each row `[P]`; 0 for fewer than two scores."""
    return _nanstd(_exact(rewards)).squeeze(1)


def _exact(rewards: Tensor) -> Tensor:
    """Return rewards in float64; infinite ones become NaN."""
    exact = rewards.double()
    return exact.masked_fill(exact.abs() > LARGEST_REWARD, torch.nan)


def _zero_where_unscored(advantages: Tensor) -> Tensor:
    # `nan_to_num` would also replace infinite values.
    return advantages.masked_fill(advantages.isnan(), 0.0)


def _check_groups(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise UsageError(
            f"Rewards have the shape {list(rewards.shape)}, expected [prompts, num_generations] "
            "with at least two completions to compare. Set `num_generations` to 2 or more."
        )


def _deviations(values: Tensor) -> Tensor:
    above = _above_lowest(values)
    return above - above.nanmean(dim=1, keepdim=True)


def _above_lowest(values: Tensor) -> Tensor:
    # equal rewards then have exactly no advantage, however large; their mean would be rounded
    if not values.numel():
        return values
    return values - values.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)


def _nanstd(values: Tensor) -> Tensor:
    """Bessel-corrected standard deviation of each row `[P, 1]`; 0 for fewer than two values."""
    deviations = _deviations(values)
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    variance = deviations.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return variance.sqrt()
