"""AdamW and its learning-rate schedule, and checks of other optimizers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from lightning import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
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
    _leave_scale(optimizer)
    return optimizer


def _leave_scale(optimizer: Optimizer) -> None:
    """Keep a fused step from unscaling gradients itself.

    Lightning then refuses to clip, even in bf16-mixed, where there is nothing to unscale.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def check_optimizers(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRSchedulerConfig],
    trained: Sequence[nn.Parameter],
) -> None:
    """Refuse what a module's `configure_optimizers` returned if it would not train the policy.

    The gradients of the optimizer are unscaled and clipped by the module from now on.

    Raises:
        ValueError: there is not exactly one optimizer, it has no weight of the policy, or a
            scheduler needs a metric.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"`configure_optimizers` returned {len(optimizers)} optimizers. The Trainer counts a "
            "step of each, and the policy versions of a run are its steps. Return one; it may have "
            "several parameter groups."
        )
    (optimizer,) = optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in trained):
        raise ValueError(
            "`configure_optimizers` returned no optimizer of the policy's weights. Make it from "
            "`self.parameters()`, which are complete when Lightning calls it."
        )
    _leave_scale(optimizer)
    for config in schedulers:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            raise ValueError(
                "`ReduceLROnPlateau` needs its `monitor`, which Lightning does not pass on to a "
                "module with manual optimization. Use `lr_scheduler_type` or another scheduler; in "
                "a LightningModule with automatic optimization it works."
            )


def due_schedulers(trainer: Trainer) -> Iterator[LRScheduler]:
    """Yield the schedulers to step after an optimizer step, by their `interval` and `frequency`.

    An interval of `epoch` ends with the last optimizer step of a round.
    """
    for config in trainer.lr_scheduler_configs:
        by_step = config.interval == "step"
        count = trainer.global_step if by_step else trainer.current_epoch + 1
        if (by_step or trainer.is_last_batch) and count % config.frequency == 0:
            yield config.scheduler


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
    return _Schedule(optimizer, lambda step: factor(step + 1))


class _Schedule(LambdaLR):
    """Leaves parameter groups alone that a callback adds later, such as `BackboneFinetuning`."""

    def get_lr(self) -> list[Any]:
        scheduled = super().get_lr()
        return [*scheduled, *(g["lr"] for g in self.optimizer.param_groups[len(scheduled) :])]
