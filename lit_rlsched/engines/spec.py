"""An engine's settings at its start, its reported state, and its errors."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from socket import gethostname
from typing import TYPE_CHECKING

from lit_rlsched.settings import UsageError

if TYPE_CHECKING:
    import torch

Weights = Iterable[tuple[str, "torch.Tensor"]]
"""Tensors with their Hugging Face names."""


class EngineBroken(RuntimeError):
    """An engine has lost one of its processes: it must be started again, its requests are lost."""


class EngineDied(RuntimeError):
    """An engine's process has died: another one replaces it, its requests are lost."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Sizes of the policy's LoRA adapters."""

    rank: int
    """The largest rank."""
    modules: tuple[str, ...]
    """Last parts of the names of layers with adapters, such as `q_proj`."""
    parameters: int
    """Number of their parameters."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine needs to know about the run."""

    model: str
    """Folder or hub name of the checkpoint that the policy was loaded from.

    A folder becomes an absolute path: an engine on another host has another working directory.
    """
    slots: int
    """Maximum number of requests in the engine, or in all of an `EnginePool`, at the same time."""
    max_model_len: int
    """Maximum number of tokens of a prompt and its completion together."""
    eos_token_ids: tuple[int, ...]
    """All tokens that end a completion."""
    # a simulation runs without torch
    dtype: "torch.dtype" = field(default_factory=lambda: import_module("torch").float32)
    device: "torch.device" = field(default_factory=lambda: import_module("torch").device("cpu"))
    policy: "torch.nn.Module | None" = None
    """The trainer's Hugging Face model. An engine that decodes with it needs no second copy.
    None in a process of its own: such an engine loads `model`."""
    seed: int = 0
    kv_cache_bytes: int | None = None
    """Maximum size of the key-value cache, if the run has a memory budget for it."""
    adapters: AdapterSpec | None = None
    """The policy's adapters, for an engine with `enable_lora`."""
    index: int = 0
    """Which of the run's engines it is, from 0."""
    engines: int = 1
    """Number of engines of the run, which share the node's devices or cores equally."""
    first_gpu: int = 0
    """The first of the node's GPUs for engines. The GPUs before it are the trainer's alone."""

    def __post_init__(self) -> None:
        if os.path.isdir(self.model):
            object.__setattr__(self, "model", os.path.abspath(self.model))

    def check_model(self) -> None:
        """Refuse a folder that this host does not have."""
        if os.path.isabs(self.model) and not os.path.isdir(self.model):
            raise UsageError(
                f"`model={self.model}`: there is no such folder on {gethostname()}, where "
                f"{self.name} runs. Copy the model there, to the same path."
            )

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return engine_name(self.index, self.engines)


def engine_name(index: int, engines: int) -> str:
    """Name of one of several engines in messages."""
    return "the engine" if engines == 1 else f"engine {index} of {engines}"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds now, and its counters since `start`."""

    running: int
    waiting: int
    kv_tokens: int
    """Tokens of key-value cache in use; a shared prefix counts once."""
    step_kv_tokens: int | None = None
    """Tokens in use during the last step, before finished requests left; None: `kv_tokens`."""
    preemptions: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    """Prompt and prefix tokens that were computed."""
    cached_tokens: int = 0
    """Prompt and prefix tokens that were read from a cache instead."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The tokens that an aborted request had drawn since it was submitted."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine's memory depends on besides its `EngineSpec`."""

    parameters: int
    """Number of the policy's parameters, without adapters."""
    token_bytes: int
    """Bytes of key-value cache per token, in all layers."""
    memory: int
    """Bytes of memory of the device."""

    def full_slots(self, spec: EngineSpec) -> int:
        """Bytes of key-value cache when all slots are full."""
        return spec.slots * spec.max_model_len * self.token_bytes

    def say_slots(self, spec: EngineSpec) -> str:
        """Explain `full_slots`."""
        tokens = f"{spec.max_model_len:,} tokens x {self.token_bytes:,} bytes"
        return f"{spec.slots:,} slots x {tokens}"

    def say_weights(self, dtype: "torch.dtype") -> str:
        """Explain the size of the weights."""
        return f"{self.parameters:,} parameters, {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory an engine will hold, in bytes."""

    weights: int
    cache: int
    stays: bool
    """Whether weights and cache stay in memory during the update."""
    how_weights: str
    """How `weights` follows from the settings."""
    how_cache: str
    handed_over: int = 0
    """Bytes of host memory through which weights reach the engine's process."""
    asleep: int = 0
    """Bytes of host memory that keep the weights while the engine sleeps."""
    apart: bool = False
    """Whether weights and cache are on GPUs that the trainer does not use."""
