"""AdamW and its learning-rate schedule."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

Optim = Literal["adamw_torch", "adamw_torch_fused"]


def check_optim(optim: str | None) -> None:
    """Refuse a name that is not in `Optim` with a `ValueError`."""
    if optim not in (*get_args(Optim), None):
        raise ValueError(
            f"`{optim=}` is unknown. Use 'adamw_torch_fused', 'adamw_torch', or leave it out."
        )


def is_fused(optim: Optim | None, device: str) -> bool:
    """Whether AdamW is fused, by default on a GPU."""
    return device == "cuda" if optim is None else optim == "adamw_torch_fused"


def make_adamw(parameters: Iterable[nn.Parameter], fused: bool, **settings: Any) -> AdamW:
    """Build an AdamW whose gradients are unscaled and clipped by the module.

    On a GPU the step that is not fused needs a temporary as large as all parameters.
    """
    optimizer = AdamW(parameters, fused=True if fused else None, **settings)
    # A fused step can unscale gradients itself. Lightning then refuses to clip, even in bf16-mixed,
    # where there is nothing to unscale.
    optimizer._step_supports_amp_scaling = False
    return optimizer


def keep_step(checkpoint: Mapping[str, Any], fused: bool) -> None:
    """Change a Lightning checkpoint's `optimizer_states` to this run's `fused` setting."""
    for state in checkpoint.get("optimizer_states", ()):
        for group in state["param_groups"]:
            group |= {"fused": True if fused else None, "foreach": None}


def with_schedule(optimizer: AdamW, kind: str, warmup_steps: int, steps: float) -> LambdaLR:
    """Build a learning-rate schedule with linear warm-up.

    `kind` is `constant` or a name of `transformers.get_scheduler`, `steps` the optimizer steps of
    the run, infinite or -1 if unknown.
    """
    scheduler = get_scheduler(
        "constant_with_warmup" if kind == "constant" else kind,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=int(steps) + 1 if math.isfinite(steps) else None,
    )
    # One step ahead, because a warm-up that begins at zero would waste a round.
    factor = scheduler.lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: factor(step + 1))
