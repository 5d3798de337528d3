"""AdamW and its learning-rate schedule, and checks of other optimizers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import local
from lit_rlsched.training.round import Round

Optim = Literal["adamw_torch", "adamw_torch_fused"]
_SPARED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Finds biases and norms by name, in `transformers.Trainer.get_decay_parameter_names` too."""


def is_fused(optim: Optim | None, device: str) -> bool:
    """Whether AdamW is fused, by default on a GPU."""
    return device == "cuda" if optim is None else optim == "adamw_torch_fused"


def make_adamw(module: nn.Module, fused: bool, **settings: Any) -> AdamW:
    """Build an AdamW of a module's trained weights; the module unscales and clips gradients.

    Biases and the weights of norms do not decay, found by name and type as transformers does.
    On a GPU the step that is not fused needs a temporary as large as all parameters.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups: list[Any] = [{"params": [*trained.values()]}]
    if settings.get("weight_decay"):
        decaying = {*get_parameter_names(module, [nn.LayerNorm], _SPARED)}
        parts = [[p for n, p in trained.items() if (n in decaying) is on] for on in (True, False)]
        groups = [{"params": parts[0]}, {"params": parts[1], "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]] or groups[:1]
    optimizer = AdamW(groups, fused=True if fused else None, **settings)
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
    """
    if len(optimizers) != 1:
        raise UsageError(
            f"`configure_optimizers` returned {len(optimizers)} optimizers. The Trainer counts a "
            "step of each, and the policy versions of a run are its steps. Return one; it may have "
            "several parameter groups."
        )
    (optimizer,) = optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in trained):
        raise UsageError(
            "`configure_optimizers` returned no optimizer of the policy's weights. Make it from "
            "`self.parameters()`, which are complete when Lightning calls it."
        )
    _leave_scale(optimizer)
    for config in schedulers:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            raise UsageError(
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
    ahead = min(warmup_steps, 1)  # a warm-up that begins at zero would waste a round
    scheduler = get_scheduler(
        "constant_with_warmup" if kind == "constant" else kind,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=int(steps) + ahead if math.isfinite(steps) else None,
    )
    return _Schedule(optimizer, lambda step: scheduler.lr_lambdas[0](step + ahead))


class _Schedule(LambdaLR):
    """Leaves parameter groups alone that a callback adds later, such as `BackboneFinetuning`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take one learning rate for each parameter group of the checkpoint."""
        super().load_state_dict(state_dict)
        self.lr_lambdas = self.lr_lambdas[:1] * len(self.base_lrs)

    def get_lr(self) -> list[Any]:
        scheduled = super().get_lr()
        return [*scheduled, *(g["lr"] for g in self.optimizer.param_groups[len(scheduled) :])]


def check_gradient(trainer: Trainer, norm: Tensor, loss: Tensor | float) -> None:
    """Stop before an optimizer step with a gradient norm that is not finite.

    A `GradScaler` skips such a step and halves its scale, so the gradient itself is wrong only if
    that did not help with a scale below 1.
    """
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    if math.isfinite(norm) or (scaled and loss_scale(trainer) >= 1):
        return
    run = getattr(getattr(trainer, "datamodule", None), "run", None)
    round: Round | None = getattr(run, "current", None)
    seen = ""
    if round is not None:
        scores = [s for c in round.completions for s in c.scores or () if s is not None]
        advantages = [c.advantage for c in round.completions]
        rewards, given = (
            f"{min(values):.4g} to {max(values):.4g}" if values else "none"
            for values in (scores, advantages)
        )
        seen = f"; round {round.ordinal}: rewards {rewards}, advantages {given}"
    raise FloatingPointError(
        f"The gradient of optimizer step {trainer.global_step} is not finite (norm {float(norm)}, "
        f"loss {float(loss):.4g}{seen}). The step was not taken, so the weights are "
        "unchanged. Look at rewards and losses of the last rounds; a lower learning rate, "
        "`gradient_clip_val`, bounded rewards or a higher precision may help. Resume from the last "
        "checkpoint."
    )


def loss_scale(trainer: Trainer) -> float:
    """Factor by which a `GradScaler` multiplies losses; 1 without one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


@torch.no_grad()
def not_finite(policy: nn.Module, trained_only: bool = False) -> list[str]:
    """Return the names of weights of which this rank's part holds NaN or infinity."""
    wrong = []
    for name, weight in policy.named_parameters():
        part = local(weight)
        if (weight.requires_grad or not trained_only) and part.numel() and part.is_floating_point():
            least, largest = part.aminmax()  # one pass without a temporary; keeps NaN
            if not (math.isfinite(least) and math.isfinite(largest)):
                wrong.append(name)
    return wrong
