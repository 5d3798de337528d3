"""Stop a run if gradients or weights are not finite."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor, nn

from lit_rlsched.sharding import local
from lit_rlsched.training.round import Round


def check_gradient(trainer: Trainer, norm: Tensor, loss: Tensor | float) -> None:
    """Stop before an optimizer step with a gradient norm that is not finite.

    A `GradScaler` skips such a step and halves its scale, so the gradient itself is wrong only if
    that did not help with a scale below 1.

    Raises:
        FloatingPointError: If the norm of the unscaled gradient is NaN or infinite.
    """
    if math.isfinite(norm):
        return
    if loss_scale(trainer) >= 1 and _scaler(trainer) is not None:
        return
    run = getattr(getattr(trainer, "datamodule", None), "run", None)
    round = getattr(run, "current", None)
    raise FloatingPointError(
        f"The gradient of optimizer step {trainer.global_step} is not finite (norm {float(norm)}, "
        f"loss {float(loss):.4g}{_rewards(round)}). The step was not taken, so the weights are "
        "unchanged. Look at rewards and losses of the last rounds; a lower learning rate, "
        "`gradient_clip_val`, bounded rewards or a higher precision may help. Resume from the last "
        "checkpoint."
    )


def loss_scale(trainer: Trainer) -> float:
    """Factor by which a `GradScaler` multiplies losses; 1 without one."""
    scaler = _scaler(trainer)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _rewards(round: Round | None) -> str:
    if round is None:
        return ""
    scores = [s for c in round.completions for s in c.scores or () if s is not None]
    advantages = [c.advantage for c in round.completions]
    return f"; round {round.ordinal}: rewards {_range(scores)}, advantages {_range(advantages)}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}" if values else "none"


@torch.no_grad()
def not_finite(policy: nn.Module, trained_only: bool = False) -> list[str]:
    """Return the names of weights of which this rank's part holds NaN or infinity."""
    return [
        name
        for name, weight in policy.named_parameters()
        if (weight.requires_grad or not trained_only) and not _finite(local(weight))
    ]


def refuse_weights(wrong: Sequence[str]) -> None:
    """Stop before weights that are not finite are used.

    Raises:
        FloatingPointError: If there are any; names the first of `wrong`.
    """
    if wrong:
        raise FloatingPointError(
            f"The trainer's weights are not finite: {len(wrong)} tensors hold NaN or infinity, the "
            f"first is `{wrong[0]}`. The engine is not the cause. Resume from an earlier "
            "checkpoint; a lower learning rate may help."
        )


def _finite(weight: Tensor) -> bool:
    if not weight.numel() or not weight.is_floating_point():
        return True
    least, largest = weight.aminmax()  # one pass without a temporary; keeps NaN
    return math.isfinite(least) and math.isfinite(largest)
