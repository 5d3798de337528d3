"""The dtype of the policy's weights, buffers and adapters in each Trainer precision."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, Precision
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel

from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import base_model, language_models

HALF = (torch.bfloat16, torch.float16)
PASSES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
"""What forward and backward passes compute in, by `trainer.precision`. The engine decodes in it."""
ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Enters a Trainer's precision: `trainer.precision_plugin.forward_context`."""


def load_dtype(precision: str | None, lora: bool) -> torch.dtype:
    """The dtype in which to load the policy in a Trainer's precision, `None` without a Trainer.

    Trained weights stay in float32 unless the precision says otherwise. A frozen base under LoRA
    adapters is loaded in bfloat16 in `bf16-mixed`, where autocast would round it in every pass.
    """
    if precision == "bf16-true" or (precision == "bf16-mixed" and lora):
        return torch.bfloat16
    return {"16-true": torch.float16, "64-true": torch.float64}.get(str(precision), torch.float32)


def check_precision(plugin: Precision) -> None:
    """Refuse a Trainer's precision that an engine could not decode in."""
    quantises = isinstance(plugin, BitsandbytesPrecision)
    if quantises or plugin.precision not in PASSES:
        name = type(plugin).__name__ if quantises else f"precision={plugin.precision}"
        raise UsageError(
            f"`Trainer`: `{name}` trains in a precision that no engine decodes in, so completions "
            f"would come from another policy than the one that is trained. Use one of "
            f"{', '.join(map(repr, PASSES))}, with `lora_rank` to save memory."
        )


class KeepsFloat32(nn.Module):
    """Mixin that keeps in float32 what transformers keeps in float32 in half precision.

    `Trainer(precision="bf16-true")` casts every tensor of a module. With this base class before
    `LightningModule`, LoRA adapters and the tensors that transformers loads in float32 stay in
    float32, for every policy in the module (`docs/explanation/precision.md`).

    Example:
        >>> class Policy(KeepsFloat32, LightningModule): ...
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        to = fn(torch.empty(0)).dtype
        with keeping_float32(self, to):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def to_like(model: nn.Module, like: Tensor) -> nn.Module:
    """Move a model to a tensor's device and dtype, except what must stay in float32."""
    first = next(model.parameters())
    if (first.device, first.dtype) == (like.device, like.dtype):
        return model
    with keeping_float32(model, like.dtype):
        return model.to(device=like.device, dtype=like.dtype)


@contextmanager
def keeping_float32(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Restore what must stay in float32 after the block has cast the module to `dtype`."""
    kept = [
        (tensors, key, tensors[key].data)
        for model in (language_models(module) if dtype in HALF else ())
        for _, tensors, key in _float32_tensors(base_model(model), dtype)
        if tensors[key].dtype == torch.float32
    ]
    yield
    for tensors, key, before in kept:
        now = tensors[key]
        if isinstance(now, nn.Parameter):
            now.data = before.to(now.device)
        else:
            tensors[key] = before.to(now.device)


def check_float32(policy: nn.Module, owner: str) -> None:
    """Refuse a policy with a rounded tensor that transformers keeps in float32."""
    model, dtype = base_model(policy), next(policy.parameters()).dtype
    if dtype not in HALF:
        return
    for name, tensors, key in _float32_tensors(model, dtype):
        if tensors[key].dtype in HALF and "lora_" not in name:
            raise UsageError(
                f"`precision`: `{name}` of `{type(model).__name__}` was rounded to {dtype}, "
                "but transformers and vLLM keep it in float32, so the trained model would differ "
                "from the one that decodes. Use `precision: bf16-mixed`, or derive "
                f"`{owner}(lit_rlsched.training.precision.KeepsFloat32, LightningModule)`."
            )


def main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of most numbers in floating-point tensors."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def trains_in_half(policy: nn.Module) -> str | None:
    """Say why training will hardly change the weights, or `None` if it will."""
    half = [p for p in policy.parameters() if p.requires_grad and p.dtype in HALF]
    if not half:
        return None
    return (
        f"The trained weights are in {str(half[0].dtype).removeprefix('torch.')}, in which most "
        "updates with RL's learning rates are rounded away: one AdamW step at 1e-6 changes about "
        "2 % of the weights. Use `precision: bf16-mixed`, which keeps them in float32, or "
        "`lora_rank`, whose adapters are float32 in every precision."
    )


def _float32_tensors(
    model: PreTrainedModel, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Tensors that must be float32 in a model of precision `dtype`.

    Yields the name of each, the dictionary of its module that holds it, and its key there.
    """
    names = kept_in_float32(model, dtype)
    for path, part in model.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                name = f"{path}.{key}".removeprefix(".").replace(".base_layer.", ".")
                if tensor is not None and (name in names or "lora_" in name):
                    yield name, tensors, key


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Names of the tensors that are float32 in a model that transformers loads in `dtype`."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        twin = type(model)._from_config(config, dtype=dtype)
    tensors = [*twin.named_parameters(), *twin.named_buffers()]
    named = set(twin._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        named |= set(twin._keep_in_fp32_modules or ())
    return {
        name
        for name, tensor in tensors
        if tensor.dtype == torch.float32 or any(f".{part}." in f".{name}." for part in named)
    }


def cast_once(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Cast a linear layer's weights to autocast's precision once for all calls of a pass.

    `torch.autocast` with `cache_enabled=False`, as Lightning enters it, casts them in every call
    and every recomputation. Values and gradients are unchanged: the gradients of the calls are cast
    to fp32 one by one and added in fp32.
    """
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32:
        return layer
    device = layer.weight.device.type
    if not torch.is_autocast_enabled(device):
        return layer
    dtype = torch.get_autocast_dtype(device)
    parameters = dict(layer.named_parameters())
    low: dict[str, Tensor] = {}

    def call(states: Tensor) -> Tensor:
        if not low:  # at the first call, because the body's pass needs the memory
            low.update((name, p.detach().to(dtype)) for name, p in parameters.items())
        used = {name: _Cast.apply(p, low[name]) for name, p in parameters.items()}  # type: ignore[no-untyped-call]
        return functional_call(layer, used, (states,))

    return call


class _Cast(torch.autograd.Function):
    """Return a cast made earlier; the backward pass casts the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return low.view_as(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(ctx.dtype), None
