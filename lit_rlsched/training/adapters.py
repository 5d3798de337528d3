"""The policy's LoRA adapters, for an engine that holds the base model itself."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lit_rlsched.engines.base import AdapterSpec
from lit_rlsched.lora import PLAIN_STARTS, base_model


def adapter_spec(policy: nn.Module) -> AdapterSpec:
    """Return the sizes of the policy's adapters.

    Raises:
        ValueError: The policy has no adapters, or trains more than the matrices A and B of linear
            layers.
    """
    layers = dict(_layers(policy))
    if not layers:
        raise ValueError(
            "`enable_lora=True` of the engine: the policy has no LoRA adapters. Set "
            "`model.lora_rank`, or leave `enable_lora` out."
        )
    if wrong := next(_not_plain(policy, layers), None):
        raise ValueError(
            f"`enable_lora=True` of the engine: {wrong}, and vLLM's LoRA slot holds the matrices A "
            "and B of linear layers alone. Leave `enable_lora` out: adapters are then merged."
        )
    matrices = [_matrices(layer) for layer in layers.values()]
    return AdapterSpec(
        rank=max(a.shape[0] for a, _ in matrices),
        modules=tuple(sorted({name.rpartition(".")[2] for name in layers})),
        parameters=sum(a.numel() + b.numel() for a, b in matrices),
    )


def named_adapters(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices A and B of each layer, as parts of its name; B includes LoRA's scale."""
    for name, layer in _layers(policy):
        a, b = (matrix.detach() for matrix in _matrices(layer))
        yield f"{name}.lora_A.weight", a
        yield f"{name}.lora_B.weight", b * layer.scaling[_adapter(layer)]


def _layers(policy: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in base_model(policy).named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "active_adapters"):
            yield name, module


def _adapter(layer: Any) -> str:
    (name,) = layer.active_adapters
    return str(name)


def _matrices(layer: Any) -> tuple[Tensor, Tensor]:
    adapter = _adapter(layer)
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _not_plain(policy: Any, layers: dict[str, Any]) -> Iterator[str]:
    """Say what the slot cannot hold."""
    from peft.tuners.lora import Linear

    for name, layer in layers.items():
        if len(layer.active_adapters) != 1:
            yield f"`{name}` has {len(layer.active_adapters)} active adapters"
        elif not isinstance(layer, Linear):
            yield f"`{name}` has an adapter of type `{type(layer).__name__}`"
        elif variant := layer.lora_variant.get(_adapter(layer)):
            yield f"`{name}` has an adapter of type `{type(variant).__name__}`"
    held = {id(matrix) for layer in layers.values() for matrix in _matrices(layer)}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            yield f"`{name}` is trained too"
    for config in getattr(policy, "peft_config", {}).values():
        if getattr(config, "init_lora_weights", True) not in PLAIN_STARTS:
            yield f"`init_lora_weights={config.init_lora_weights!r}` changes the base weights"
