"""What a Trainer's precision does to the policy: its weights, its tables, its adapters."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlsched.policy import base_model

HALF = (torch.bfloat16, torch.float16)


def load_dtype(precision: str | None, lora: bool) -> torch.dtype:
    """What the policy is loaded in.

    Trained weights are kept in float32 unless the precision says otherwise. A base under adapters
    is never trained, and autocast would round it in every pass: in `bf16-mixed` it is held in
    bfloat16, as peft's users do; its adapters stay in float32.

    Args:
        precision: The Trainer's, `None` where there is no Trainer.
        lora: Whether all of it is frozen, under adapters.
    """
    if precision == "bf16-true" or (precision == "bf16-mixed" and lora):
        return torch.bfloat16
    return torch.float16 if precision == "16-true" else torch.float32


class KeepsFloat32(nn.Module):
    """To be put before `LightningModule`: half precision as transformers means it.

    `Trainer(precision="bf16-true")` casts every tensor of the module. What transformers keeps in
    float32 where it loads a model in bfloat16 stays in float32 here, the rotary frequencies above
    all (rounded, they turn by up to 2.4 radians too far or too little at position 2,048 of
    Qwen3-0.6B); and so do LoRA's adapters, as in peft. Holds for every policy inside the module.

    Example:
        >>> class Policy(KeepsFloat32, LightningModule): ...
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        to = fn(torch.empty(0)).dtype
        with keeping_float32(self, to):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def to_like(model: nn.Module, like: Tensor) -> nn.Module:
    """Move a model to a tensor's device and precision; what belongs in float32 stays there."""
    first = next(model.parameters())
    if (first.device, first.dtype) == (like.device, like.dtype):
        return model
    with keeping_float32(model, like.dtype):
        return model.to(device=like.device, dtype=like.dtype)


@contextmanager
def keeping_float32(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Leave in float32 what belongs there while the rest of the module is cast to `dtype`."""
    kept = [
        (place, place.tensor.data)
        for model in (_policies(module) if dtype in HALF else ())
        for place in _places_of_float32(model, dtype)
        if place.tensor.dtype == torch.float32
    ]
    yield
    for place, before in kept:
        now = place.tensor
        if isinstance(now, nn.Parameter):
            now.data = before.to(now.device)
        else:
            place.tensors[place.key] = before.to(now.device)


def check_float32(policy: nn.Module, owner: str) -> None:
    """Refuse a policy in which something was rounded that transformers keeps in float32.

    Args:
        policy: A transformers causal language model, or one wrapped by PEFT.
        owner: The class of the LightningModule that holds it.

    Raises:
        ValueError: naming the first such tensor, and what helps.
    """
    model, dtype = base_model(policy), next(policy.parameters()).dtype
    if dtype not in HALF:
        return
    for place in _places_of_float32(model, dtype):
        if place.tensor.dtype in HALF and "lora_" not in place.name:
            raise ValueError(
                f"`precision`: `{place.name}` of `{type(model).__name__}` was rounded to {dtype}, "
                "and transformers and vLLM keep it in float32: what is trained would be another "
                "model than what decodes. Use `precision: bf16-mixed`, or derive "
                f"`{owner}(lit_rlsched.precision.KeepsFloat32, LightningModule)`."
            )


def trains_in_half(policy: nn.Module) -> str | None:
    """Why training will hardly move the weights; `None`: it will."""
    half = [p for p in policy.parameters() if p.requires_grad and p.dtype in HALF]
    if not half:
        return None
    return (
        f"The weights that are trained are in {str(half[0].dtype).removeprefix('torch.')}, which "
        "rounds most steps of RL's learning rates away: one AdamW step at 1e-6 moves about 2 %. "
        "Use `precision: bf16-mixed`, which keeps them in float32, or `lora_rank`, whose adapters "
        "are float32 in every precision."
    )


def _policies(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Transformers models inside, each whole."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _policies(child)


class _Place(NamedTuple):
    """Where a tensor of a model is."""

    name: str
    """In the whole model."""
    tensors: dict[str, Any]
    """The parameters or buffers of its module."""
    key: str

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.tensors[self.key]
        return tensor


def _places_of_float32(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[_Place]:
    """Of what is to be float32 in a model of that precision."""
    names = _kept_by_transformers(model, dtype)
    for path, part in model.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                name = f"{path}.{key}".removeprefix(".").replace(".base_layer.", ".")
                if tensor is not None and (name in names or "lora_" in name):
                    yield _Place(name, tensors, key)


def _kept_by_transformers(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Names of what transformers has in float32 in a model that it loads in `dtype`."""
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
        if tensor.dtype == torch.float32 or any(_within(part, name) for part in named)
    }


def _within(part: str, name: str) -> bool:
    return f".{part}." in f".{name}."
