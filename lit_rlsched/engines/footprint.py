"""What an engine will hold in memory, as far as it can be told before it starts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lit_rlsched.engines.base import EngineSpec


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides how much an engine holds, beside its `EngineSpec`."""

    parameters: int
    """Numbers in the weights of the policy, without adapters."""
    token_bytes: int
    """Bytes a token takes in the key-value cache, in all layers."""
    memory: int
    """Bytes of the device."""
    apart: bool = False
    """Whether the engine is in a process of its own."""

    def full_slots(self, spec: "EngineSpec") -> int:
        """Bytes of cache where all slots are full."""
        return spec.slots * spec.max_model_len * self.token_bytes

    def say_slots(self, spec: "EngineSpec") -> str:
        """How these follow from the settings."""
        tokens = f"{spec.max_model_len:,} tokens x {self.token_bytes:,} bytes"
        return f"{spec.slots:,} slots x {tokens}"

    def say_weights(self, dtype: "torch.dtype") -> str:
        """How many numbers, in which precision."""
        return f"{self.parameters:,} parameters, {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an engine will hold, in bytes."""

    weights: int
    cache: int
    stays: bool
    """Whether weights and cache stay while the trainer updates."""
    how_weights: str
    how_cache: str
    handed_over: int = 0
    """Memory of the machine through which weights reach the engine's process."""
    like_trainer: bool = False
    """Whether its steps are forward passes of the trainer's model, which can be measured."""
