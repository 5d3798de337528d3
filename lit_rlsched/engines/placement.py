"""Which of a node's devices or cores each of several engines gets."""

import gc
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.settings import UsageError

if TYPE_CHECKING:
    import torch


def available_cores() -> list[int]:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_devices(device_type: str) -> int:
    """Number of this node's devices: GPUs, or on CPU the cores that this process may use."""
    if device_type == "cuda":
        import torch

        return torch.cuda.device_count()
    return len(available_cores())


def cores_of(spec: EngineSpec, cores: list[int]) -> list[int]:
    """Return the cores of an engine: an equal share; all, if there are fewer cores than engines."""
    each = len(cores) // spec.engines
    return cores[spec.index * each : (spec.index + 1) * each] if each else cores


def variables_of(
    spec: EngineSpec, tensor_parallel_size: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that let an engine's process see only its own GPUs."""
    if spec.engines + spec.first_gpu == 1 or spec.device.type != "cuda":
        return {}
    first = spec.first_gpu + spec.index * tensor_parallel_size
    gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpus = gpus or [str(gpu) for gpu in range(first + tensor_parallel_size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + tensor_parallel_size])}


def check_devices(spec: EngineSpec, tensor_parallel_size: int) -> None:
    """Refuse more engines than the node has GPUs for."""
    if spec.device.type != "cuda":
        return
    gpus = num_devices("cuda")
    if spec.first_gpu + spec.engines * tensor_parallel_size > gpus:
        each = f" of {tensor_parallel_size} GPUs each" if tensor_parallel_size > 1 else ""
        trainers = f", of which the trainer has {spec.first_gpu}" if spec.first_gpu else ""
        most = (gpus - spec.first_gpu) // tensor_parallel_size
        raise UsageError(
            f"`num_engines={spec.engines}`: an engine{each} needs GPUs of its own, and this node "
            f"has {gpus}{trainers}. "
            + (f"Use {most} or less." if most > 0 else "Leave `weight_transfer='nccl'` out.")
        )


def give_back(device: "torch.device | None") -> None:
    """Empty PyTorch's CUDA cache in the trainer's process, so that the engine gets the memory.

    An engine that wakes up does this itself, in the process of its model.
    """
    if device is not None and device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
