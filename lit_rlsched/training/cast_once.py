"""A linear layer that autocast would cast anew in each of many calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call


def cast_once(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer for the calls of one pass, its fp32 weights cast to autocast's precision once.

    `torch.autocast` with `cache_enabled=False`, as Lightning enters it, casts them in every call
    and in every recomputation. Values and gradients are the same: the gradients of the calls are
    still cast to fp32 one by one and added in fp32.

    Args:
        layer: What is called. Anything but a plain `nn.Linear` with fp32 weights inside autocast is
            returned as it is.

    Returns:
        A function of the layer's input `[..., H]`. It holds the cast weights as long as it lives,
        and must not outlive a change of the weights.
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
        if not low:  # not before the first call: the body's pass needs the memory
            low.update((name, p.detach().to(dtype)) for name, p in parameters.items())
        used = {name: _Cast.apply(p, low[name]) for name, p in parameters.items()}  # type: ignore[no-untyped-call]
        return functional_call(layer, used, (states,))

    return call


class _Cast(torch.autograd.Function):
    """A cast that was made before; backward, the cast of the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return low.view_as(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(ctx.dtype), None
