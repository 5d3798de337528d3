"""AdamW and its learning rate, stepped once per optimizer step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

Optim = Literal["adamw_torch", "adamw_torch_fused"]


def check_optim(optim: str | None) -> None:
    """Refuse a name that is none of `Optim`.

    Raises:
        ValueError: it is unknown.
    """
    if optim not in ("adamw_torch", "adamw_torch_fused", None):
        raise ValueError(
            f"`{optim=}` is unknown. Use 'adamw_torch_fused', 'adamw_torch', or leave it out."
        )


def is_fused(optim: Optim | None, device: str) -> bool:
    """Whether AdamW's step is one kernel for all parameters: by default on a GPU."""
    return device == "cuda" if optim is None else optim == "adamw_torch_fused"


def make_adamw(parameters: Iterable[nn.Parameter], fused: bool, **settings: Any) -> AdamW:
    """AdamW whose gradients we unscale and clip ourselves, fused or not.

    On a GPU the step that is not fused works on all parameters at once and takes a temporary as
    large as all of them; the fused one takes none. (The state takes two numbers a parameter in
    either.)

    Args:
        parameters: What is trained.
        fused: See `is_fused`.
        **settings: AdamW's.
    """
    optimizer = AdamW(parameters, fused=True if fused else None, **settings)
    # A fused step can unscale the gradients of a `GradScaler` itself. Lightning then leaves it to
    # it and refuses to clip, in bf16-mixed too, where there is nothing to unscale.
    optimizer._step_supports_amp_scaling = False
    return optimizer


def keep_step(checkpoint: Mapping[str, Any], fused: bool) -> None:
    """Let a resumed AdamW step as this run says: its state would bring the other run's step back.

    Args:
        checkpoint: With `optimizer_states`, as Lightning writes them; changed.
        fused: See `is_fused`.
    """
    for state in checkpoint.get("optimizer_states", ()):
        for group in state["param_groups"]:
            group |= {"fused": True if fused else None, "foreach": None}


def with_schedule(optimizer: AdamW, kind: str, warmup_steps: int, steps: float) -> LambdaLR:
    """A learning rate that rises linearly, then stays or falls.

    Args:
        optimizer: What it is for.
        kind: `constant`, or a name of `transformers.get_scheduler`.
        warmup_steps: Optimizer steps until it is at its peak.
        steps: Optimizer steps of the run, infinite or -1 where nobody knows.
    """
    scheduler = get_scheduler(
        "constant_with_warmup" if kind == "constant" else kind,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=int(steps) + 1 if math.isfinite(steps) else None,
    )
    # one step ahead: transformers begins a warm-up at zero, which would waste a round
    factor = scheduler.lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: factor(step + 1))
