"""Policy-gradient losses as pure functions of log-probabilities.

Shapes: `B` sequences of a micro-batch, `C` completion positions. A step's micro-batches may hold
any number of sequences and tokens, so a loss is normalised by the step's totals: the sum of the
losses of a step's micro-batches is the step's loss, however the step was cut (but for bnpo, which
means its micro-batches).
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"]
RatioLevel = Literal["token", "sequence"]
ImportanceSamplingMode = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


class LossOutput(NamedTuple):
    """A micro-batch's share of the step's loss, and detached scalars to log."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    rollout_logp: Tensor | None = None,
    loss_type: LossType = "dapo",
    importance_sampling_level: RatioLevel | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_mode: ImportanceSamplingMode | None = "sequence_mask",
    importance_sampling_clip_max: float = 3.0,
    step_sequences: int | None = None,
    step_tokens: float | None = None,
    max_completion_length: int | None = None,
) -> LossOutput:
    """Loss of one micro-batch; names, defaults and numbers are TRL's.

    With `rho = exp(logp - old_logp)`, the term of a token is
    `-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)`, for cispo
    `-stop_gradient(min(rho, epsilon_high)) A logp`. It is multiplied by the correction for the
    rollout engine, and `beta * rho * k3` is added. The loss types:

    - grpo (arXiv 2402.03300): mean over a sequence's tokens, then over sequences;
    - gspo (arXiv 2507.18071): grpo with `rho` the geometric mean over the sequence;
    - bnpo: mean over the micro-batch's tokens, weighted by its share of the step's sequences;
    - dr_grpo (arXiv 2503.20783): sum of tokens over `step_sequences * max_completion_length`;
    - dapo (arXiv 2503.14476), cispo (arXiv 2506.13585): mean over the step's tokens; of several
      steps on one round, which have different numbers, each divides by their average;
    - rloo (arXiv 2402.14740): `rho` the product over the sequence, mean over sequences.

    Args:
        logp: `[B, C]`, log-probabilities under the policy being trained.
        advantages: `[B]`.
        mask: `[B, C]`, non-zero on the tokens to train on. What the others hold is never read.
        old_logp: `[B, C]`, under the policy at the start of the step; None: the same policy.
        ref_logp: `[B, C]`, under the reference model; needed with `beta > 0`.
        rollout_logp: `[B, C]`, as reported by the rollout engine, NaN where it did not say; None:
            no correction.
        loss_type: see above.
        importance_sampling_level: one ratio per token, or one per sequence (the geometric mean).
            None: what `loss_type` says, else per token.
        epsilon: lower clip distance.
        epsilon_high: upper clip distance, None: `epsilon`; for cispo, the largest ratio itself.
        delta: cap on `rho` where the advantage is negative (two-sided clipping of INTELLECT-2,
            arXiv 2505.07291).
        beta: weight of the KL term.
        importance_sampling_mode: what happens to a ratio `exp(old_logp - rollout_logp)`, of the
            token or of the whole sequence, above the maximum: truncated to it, or masked to 0.
        importance_sampling_clip_max: that maximum.
        step_sequences: sequences of the whole optimizer step; None: `B`. On several ranks, with
            gradients averaged over them, pass the total divided by the number of ranks.
        step_tokens: tokens of the whole optimizer step, or the average over the steps of a round,
            likewise; None: those of `mask`.
        max_completion_length: the constant of dr_grpo.

    Returns:
        The loss, and metrics under TRL's names. Metrics are means over the tokens of `mask` (a
        sequence's ratio counts once per token), so that averaging them over micro-batches with the
        number of tokens as weight gives the step's value. Exceptions: names ending in `min` or
        `max`, of which to take the smallest or largest (infinite where there was no token).
        `policy_loss` is that mean of the terms, KL included, whatever the normalisation.

    Raises:
        ValueError: for settings that `check_loss_settings` refuses, if `ref_logp` or
            `max_completion_length` is needed and missing, or for rloo with a KL term.
    """
    check_loss_settings(
        loss_type,
        importance_sampling_level=importance_sampling_level,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        importance_sampling_mode=importance_sampling_mode,
        importance_sampling_clip_max=importance_sampling_clip_max,
    )
    valid = mask.bool()
    # Padding may hold anything, NaN included, which a product with a zero mask would let through.
    logp = logp.masked_fill(~valid, 0.0)
    old_logp = logp.detach() if old_logp is None else old_logp.masked_fill(~valid, 0.0)
    level = {"gspo": "sequence", "rloo": "product"}.get(
        loss_type, importance_sampling_level or "token"
    )
    ratio = _policy_ratio(logp - old_logp, valid, level)
    advantages = advantages.unsqueeze(1)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high

    if loss_type == "cispo":
        loss = -ratio.clamp(max=epsilon_high).detach() * advantages * logp
        clipped = (ratio > epsilon_high) & (advantages > 0)
        metrics = {"cispo_clip_ratio": _token_mean(clipped, valid)}
    else:
        loss = _clipped_surrogate(ratio, advantages, epsilon, epsilon_high, delta)
        metrics = _clip_metrics(ratio, advantages, valid, epsilon, epsilon_high)
    if rollout_logp is not None and importance_sampling_mode is not None:
        weight, sampling_metrics = rollout_correction(
            old_logp, rollout_logp, valid, importance_sampling_mode, importance_sampling_clip_max
        )
        loss = loss * weight
        metrics |= sampling_metrics
    if beta > 0.0:
        kl = _k3(logp, ref_logp, valid, loss_type) * ratio
        loss = loss + beta * kl
        metrics["kl"] = _token_mean(kl, valid)
    metrics["policy_loss"] = _token_mean(loss, valid)
    loss = _normalize(loss, valid, loss_type, step_sequences, step_tokens, max_completion_length)
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def check_loss_settings(
    loss_type: str,
    *,
    importance_sampling_level: str | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_mode: str | None = "sequence_mask",
    importance_sampling_clip_max: float = 3.0,
) -> None:
    """Refuse settings of `policy_loss` that are wrong or contradict each other, before a run.

    Raises:
        ValueError: naming the setting and the remedy.
    """
    levels = (*get_args(RatioLevel), None)
    modes = (*get_args(ImportanceSamplingMode), None)
    _check_choice("loss_type", loss_type, get_args(LossType))
    _check_choice("importance_sampling_level", importance_sampling_level, levels)
    _check_choice("importance_sampling_mode", importance_sampling_mode, modes)
    upper = epsilon if epsilon_high is None else epsilon_high
    rloo, cispo = loss_type == "rloo", loss_type == "cispo"
    for refused, message in (
        (
            min(epsilon, upper, beta) < 0,
            f"`epsilon={epsilon}`, `epsilon_high={epsilon_high}` and `beta={beta}` must not be "
            "negative. Use 0.0 for none.",
        ),
        (
            importance_sampling_clip_max <= 0,
            f"`importance_sampling_clip_max={importance_sampling_clip_max}` must be positive. Use "
            "`importance_sampling_mode=None` to switch the correction off.",
        ),
        (
            cispo and (epsilon_high is None or epsilon_high < 1),
            f"`loss_type='cispo'` caps the ratio itself at `epsilon_high={epsilon_high}`, which "
            "must be 1 or more, as an on-policy ratio is 1. Set it, for example to 5.0.",
        ),
        (
            delta is not None and (rloo or cispo),
            f"`delta={delta}` has no effect on `loss_type={loss_type!r}`. Remove it, or use "
            "another loss type.",
        ),
        (
            delta is not None and delta <= 1 + upper,
            f"`delta={delta}` must exceed 1 + `epsilon_high` = {1 + upper}, or the upper clip "
            "never acts. Raise `delta` or lower `epsilon_high`.",
        ),
        (
            loss_type == "gspo" and importance_sampling_level == "token",
            "`loss_type='gspo'` is the sequence-level ratio. Remove "
            "`importance_sampling_level='token'`, or use `loss_type='grpo'`.",
        ),
        (
            rloo and importance_sampling_level is not None,
            "`loss_type='rloo'` has one ratio per sequence, the product of its tokens'. Remove "
            f"`importance_sampling_level={importance_sampling_level!r}`.",
        ),
        (
            rloo and importance_sampling_mode in ("token_truncate", "token_mask"),
            f"`importance_sampling_mode={importance_sampling_mode!r}` corrects tokens, but "
            "`loss_type='rloo'` has one term per sequence. Use 'sequence_mask' or "
            "'sequence_truncate'.",
        ),
    ):
        if refused:
            raise ValueError(message)


def rollout_correction(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, mode: ImportanceSamplingMode, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights from the rollout engine's distribution to the trainer's.

    `exp(old_logp - rollout_logp)`, per token or of the sums over a sequence, and its metrics. The
    ratios in the metrics are those before truncation or masking, which would hide a mismatch.

    Args:
        old_logp: `[B, C]`.
        rollout_logp: `[B, C]`; a token the engine did not score (NaN) counts as no mismatch.
        mask: `[B, C]`, boolean.
        mode: level and remedy, as in `policy_loss`.
        cap: largest ratio to leave alone.

    Returns:
        Weights `[B, C]` for the token modes or `[B, 1]` for the sequence modes, and metrics.
    """
    difference = (old_logp - rollout_logp).masked_fill(~mask, 0.0)
    scored = mask & ~difference.isnan()
    difference = difference.nan_to_num(nan=0.0)
    level, remedy = mode.split("_")
    ratio = (difference.sum(dim=1, keepdim=True) if level == "sequence" else difference).exp()
    above = ratio > cap
    weight = ratio.clamp(max=cap) if remedy == "truncate" else ratio.masked_fill(above, 0.0)

    prefix = "sampling/importance_sampling_ratio"
    counted = mask.expand_as(difference) if level == "token" else mask.any(dim=1, keepdim=True)
    metrics = {
        f"{prefix}/min": _minimum(ratio, counted),
        f"{prefix}/mean": _token_mean(ratio, mask),
        f"{prefix}/max": -_minimum(-ratio, counted),
        f"{prefix}/clipped_fraction": _token_mean(above, mask),
        "sampling/sampling_logp_difference/mean": _token_mean(difference.abs(), scored),
        "sampling/sampling_logp_difference/max": -_minimum(-difference.abs(), scored),
    }
    return weight, metrics


def _policy_ratio(log_ratio: Tensor, valid: Tensor, level: str) -> Tensor:
    """`[B, C]` for `token`; `[B, 1]` for `sequence`, the geometric mean, and `product`."""
    if level == "token":
        return log_ratio.exp()
    total = log_ratio.sum(dim=1, keepdim=True)
    if level == "sequence":
        total = total / valid.sum(dim=1, keepdim=True).clamp(min=1)
    return total.exp()


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> Tensor:
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.min(ratio * advantages, clipped * advantages)


def _k3(logp: Tensor, ref_logp: Tensor | None, valid: Tensor, loss_type: LossType) -> Tensor:
    """Schulman's non-negative estimate of KL(policy, reference) per token."""
    if loss_type == "rloo":
        raise ValueError(
            "`loss_type='rloo'` has its KL penalty in the reward (`kl_in_reward`), not in the "
            "loss. Use `RLOOModule`, or set `beta=0.0`."
        )
    if ref_logp is None:
        raise ValueError(
            "`beta > 0` adds a KL term and needs `ref_logp`, the reference model's "
            "log-probabilities. Compute them, or set `beta=0.0`."
        )
    difference = (ref_logp - logp).masked_fill(~valid, 0.0)
    return difference.exp() - difference - 1


def divides_by(loss_type: LossType) -> Literal["sequences", "tokens"]:
    """What of the optimizer step a micro-batch's loss is proportional to the inverse of."""
    return "tokens" if loss_type in ("dapo", "cispo") else "sequences"


def _normalize(
    loss: Tensor,
    valid: Tensor,
    loss_type: LossType,
    step_sequences: int | None,
    step_tokens: float | None,
    max_completion_length: int | None,
) -> Tensor:
    """Sum `[B, C]` or `[B, 1]` terms to a scalar. Counts are at least 1: no token, loss 0."""
    sequences = valid.shape[0] if step_sequences is None else step_sequences
    if loss_type == "rloo":
        return loss.sum() / sequences
    loss = loss.masked_fill(~valid, 0.0)
    if loss_type in ("grpo", "gspo"):
        return (loss.sum(dim=1) / valid.sum(dim=1).clamp(min=1)).sum() / sequences
    if loss_type == "bnpo":
        return loss.sum() / valid.sum().clamp(min=1) * (valid.shape[0] / sequences)
    if loss_type == "dr_grpo":
        if not max_completion_length:
            raise ValueError(
                "`loss_type='dr_grpo'` divides by `max_completion_length`. Set it to the limit the "
                "completions were drawn with."
            )
        return loss.sum() / (sequences * max_completion_length)
    return loss.sum() / (valid.sum().clamp(min=1) if step_tokens is None else max(step_tokens, 1))


def _clip_metrics(
    ratio: Tensor, advantages: Tensor, valid: Tensor, epsilon: float, epsilon_high: float
) -> dict[str, Tensor]:
    low = ((ratio < 1 - epsilon) & (advantages < 0)).expand_as(valid) & valid
    high = ((ratio > 1 + epsilon_high) & (advantages > 0)).expand_as(valid) & valid
    tokens = valid.sum(dim=1)
    return {
        "clip_ratio/low_mean": _token_mean(low, valid),
        "clip_ratio/low_min": _minimum(low.sum(dim=1) / tokens, tokens > 0),
        "clip_ratio/high_mean": _token_mean(high, valid),
        "clip_ratio/high_max": -_minimum(-high.sum(dim=1) / tokens, tokens > 0),
        "clip_ratio/region_mean": _token_mean(low | high, valid),
    }


def _token_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid tokens of `[B, C]`, or of `[B, 1]` spread over its tokens; 0 if none."""
    values = values.expand_as(valid).masked_fill(~valid, 0)
    return values.sum() / valid.sum().clamp(min=1)


def _minimum(values: Tensor, counted: Tensor) -> Tensor:
    """Smallest of the values that count; infinite if none does."""
    return pad(values.masked_fill(~counted, torch.inf).flatten(), (0, 1), value=torch.inf).min()


def _check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is unknown. Use one of {list(choices)}.")
