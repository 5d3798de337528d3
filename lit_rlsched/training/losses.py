"""Policy-gradient losses as pure functions of log-probabilities.

`B` is the number of sequences of a micro-batch, `C` the length of its longest completion. Each loss
is normalised by the totals of the optimizer step, so the losses of a step's micro-batches add up to
the step's loss however the step is split.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from lit_rlsched.settings import UsageError, check_choice, check_ranges

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"]
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
    """Compute the loss of one micro-batch, with TRL's names, defaults and values.

    With `rho = exp(logp - old_logp)`, a token's term is
    `-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)`, for cispo
    `-stop_gradient(min(rho, epsilon_high)) A logp`. The term is multiplied by the importance weight
    that corrects for the rollout engine; then `beta * rho * k3` is added. The loss types:

    - grpo (arXiv 2402.03300): mean over a sequence's tokens, then over sequences;
    - gspo (arXiv 2507.18071): grpo with `rho` the geometric mean over the sequence;
    - bnpo: mean over the step's tokens, whatever other steps of the round have (TRL's with one
      micro-batch per step: it takes the mean of the means of its micro-batches);
    - dr_grpo (arXiv 2503.20783): sum over tokens divided by
      `step_sequences * max_completion_length`;
    - dapo (arXiv 2503.14476), cispo (arXiv 2506.13585): mean over the step's tokens; if a round has
      several steps with different token counts, each step divides by their average;
    - rloo (arXiv 2402.14740): `rho` is the product over the sequence; mean over sequences.

    Args:
        logp: `[B, C]`, log-probabilities under the policy.
        advantages: `[B]`.
        mask: `[B, C]`, non-zero on the tokens to train on. Other positions may hold any value.
        old_logp: `[B, C]`, under the policy at the start of the step; None: the same as `logp`.
        ref_logp: `[B, C]`, under the reference model; required if `beta > 0`.
        rollout_logp: `[B, C]`, as reported by the rollout engine, NaN where it reported none; None:
            no correction.
        loss_type: See above.
        epsilon: Lower clip distance.
        epsilon_high: Upper clip distance, `epsilon` if None; for cispo the maximum ratio itself.
        delta: Maximum of `rho` where the advantage is negative (two-sided clipping of INTELLECT-2,
            arXiv 2505.07291).
        beta: Weight of the KL term.
        importance_sampling_mode: What to do with a ratio `exp(old_logp - rollout_logp)` above
            `importance_sampling_clip_max`: truncate it to the maximum, or mask it to 0. The ratio
            is per token, or the product over the sequence.
        importance_sampling_clip_max: The maximum of that ratio.
        step_sequences: Sequences of the whole optimizer step; None: `B`. With gradients averaged
            over several ranks, pass the total divided by the number of ranks.
        step_tokens: Tokens of the whole optimizer step, or, except for bnpo, the average over the
            steps of a round, with the same division by ranks; None: the number of tokens in `mask`.
        max_completion_length: The constant of dr_grpo.

    Returns:
        The loss, and metrics under TRL's names. Metrics are means over the tokens of `mask` (a
        sequence's ratio counts once per token), so averaging them over micro-batches weighted by
        the number of tokens gives the step's value. The exceptions are names that end in `min` or
        `max`, which are reduced by minimum or maximum (infinite if there is no token). The metric
        `policy_loss` is the token mean of the terms, KL included, for every normalisation.

    Raises:
        UsageError: If `check_loss_settings` refuses the settings, or if `ref_logp` or
            `max_completion_length` is required and missing.
    """
    check_loss_settings(
        loss_type,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        importance_sampling_mode=importance_sampling_mode,
        importance_sampling_clip_max=importance_sampling_clip_max,
    )
    valid = mask.bool()
    # Multiplying by a zero mask would not remove NaN from padding.
    logp = logp.masked_fill(~valid, 0.0)
    old_logp = logp.detach() if old_logp is None else old_logp.masked_fill(~valid, 0.0)
    log_ratio = logp - old_logp
    if loss_type in ("gspo", "rloo"):  # one ratio for a sequence, `[B, 1]`
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    if loss_type == "gspo":
        log_ratio = log_ratio / valid.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    advantages = advantages.unsqueeze(1)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high

    if loss_type == "cispo":
        loss = -ratio.clamp(max=epsilon_high).detach() * advantages * logp
        clipped = (ratio > epsilon_high) & (advantages > 0)
        metrics = {"cispo_clip_ratio": _token_mean(clipped, valid)}
    else:
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        limited = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.min(limited * advantages, clipped * advantages)
        metrics = _clip_metrics(ratio, advantages, valid, epsilon, epsilon_high)
    if rollout_logp is not None and importance_sampling_mode is not None:
        weight, sampling_metrics = rollout_correction(
            old_logp, rollout_logp, valid, importance_sampling_mode, importance_sampling_clip_max
        )
        loss = loss * weight
        metrics |= sampling_metrics
    if beta > 0.0:
        if ref_logp is None:
            raise UsageError(
                "`beta > 0` adds a KL term, which needs `ref_logp`, the log-probabilities under "
                "the reference model. Pass them, or set `beta=0.0`."
            )
        # Schulman's k3, a non-negative estimate of KL(policy, reference) per token
        difference = (ref_logp - logp).masked_fill(~valid, 0.0)
        kl = (difference.exp() - difference - 1) * ratio
        loss = loss + beta * kl
        metrics["kl"] = _token_mean(kl, valid)
    metrics["policy_loss"] = _token_mean(loss, valid)
    loss = _normalize(loss, valid, loss_type, step_sequences, step_tokens, max_completion_length)
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def check_loss_settings(
    loss_type: str,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_mode: str | None = "sequence_mask",
    importance_sampling_clip_max: float = 3.0,
) -> None:
    """Refuse settings of `policy_loss` that are out of range or contradict each other."""
    check_ranges("PolicyModule", locals(), "policy_loss")
    modes = (*get_args(ImportanceSamplingMode), None)
    check_choice("policy_loss", "loss_type", loss_type, get_args(LossType))
    check_choice("policy_loss", "importance_sampling_mode", importance_sampling_mode, modes)
    upper = epsilon if epsilon_high is None else epsilon_high
    rloo, cispo = loss_type == "rloo", loss_type == "cispo"
    for refused, message in (
        (
            cispo and (epsilon_high is None or epsilon_high < 1),
            f"`loss_type='cispo'` limits the ratio itself to `{epsilon_high=}`, which must be at "
            "least 1, the on-policy ratio. Set it, for example to 5.0.",
        ),
        (
            delta is not None and (rloo or cispo),
            f"`{delta=}` has no effect on `{loss_type=}`. Remove it, or use another loss type.",
        ),
        (
            delta is not None and delta <= 1 + upper,
            f"`{delta=}` must exceed 1 + `epsilon_high` = {1 + upper}, otherwise the upper clip "
            "never acts. Raise `delta` or lower `epsilon_high`.",
        ),
        (
            rloo and beta > 0,
            f"`loss_type='rloo'` has no KL term for `{beta=}` to weigh. Use `RLOOModule`, which "
            "subtracts the KL from the reward, or `beta=0`.",
        ),
        (
            rloo and importance_sampling_mode in ("token_truncate", "token_mask"),
            f"`{importance_sampling_mode=}` corrects tokens, but `loss_type='rloo'` has one term "
            "per sequence. Use 'sequence_mask' or 'sequence_truncate'.",
        ),
    ):
        if refused:
            raise UsageError(message)


def rollout_correction(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, mode: ImportanceSamplingMode, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute importance weights from the rollout engine's distribution to the trainer's.

    The ratio is `exp(old_logp - rollout_logp)`, per token or for the sum over a sequence. The
    metrics show the ratios before truncation or masking, which would hide a mismatch.
    """
    difference = (old_logp - rollout_logp).masked_fill(~mask, 0.0)
    scored = mask & ~difference.isnan()
    difference = difference.nan_to_num(nan=0.0)
    level, remedy = mode.split("_")
    ratio = (difference.sum(dim=1, keepdim=True) if level == "sequence" else difference).exp()
    above = ratio > cap
    weight = ratio.clamp(max=cap) if remedy == "truncate" else ratio.masked_fill(above, 0.0)

    prefix = "sampling/importance_sampling_ratio"
    metrics = {
        f"{prefix}/min": _minimum(ratio, mask),
        f"{prefix}/mean": _token_mean(ratio, mask),
        f"{prefix}/max": -_minimum(-ratio, mask),
        f"{prefix}/clipped_fraction": _token_mean(above, mask),
        "sampling/sampling_logp_difference/mean": _token_mean(difference.abs(), scored),
        "sampling/sampling_logp_difference/max": -_minimum(-difference.abs(), scored),
    }
    return weight, metrics


def divides_by(loss_type: LossType) -> Literal["sequences", "tokens"]:
    """Which total of the optimizer step the loss is divided by."""
    return "tokens" if loss_type in ("bnpo", "dapo", "cispo") else "sequences"


def _normalize(
    loss: Tensor,
    valid: Tensor,
    loss_type: LossType,
    step_sequences: int | None,
    step_tokens: float | None,
    max_completion_length: int | None,
) -> Tensor:
    """Reduce `[B, C]` or `[B, 1]` terms to a scalar, which is 0 if there is no token."""
    sequences = valid.shape[0] if step_sequences is None else step_sequences
    if loss_type == "rloo":
        return loss.sum() / sequences
    loss = loss.masked_fill(~valid, 0.0)
    if loss_type in ("grpo", "gspo"):
        return (loss.sum(dim=1) / valid.sum(dim=1).clamp(min=1)).sum() / sequences
    if loss_type == "dr_grpo":
        if not max_completion_length:
            raise UsageError(
                "`loss_type='dr_grpo'` divides by `max_completion_length`. Pass the limit that the "
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
    """Mean over the valid tokens of `[B, C]`, or of `[B, 1]` repeated per token; 0 if none."""
    values = values.expand_as(valid).masked_fill(~valid, 0)
    return values.sum() / valid.sum().clamp(min=1)


def _minimum(values: Tensor, counted: Tensor) -> Tensor:
    """Minimum of the values where `counted` is True; infinite if there are none."""
    return pad(values.masked_fill(~counted, torch.inf).flatten(), (0, 1), value=torch.inf).min()
