"""How many requests an engine runs at once where nobody says."""

from typing import TYPE_CHECKING

from lit_rlsched.scheduling.micro_group_sampling import DEFAULT_SLOTS

if TYPE_CHECKING:
    import torch

LARGE_GPU_SLOTS = 1024
"""Its own on a large GPU."""
LARGE_GPU = 70 << 30
"""Bytes of one; the A100, which has them too, is none (`EngineArgs.get_batch_defaults`)."""


def default_slots(device: "torch.device") -> int:
    """VLLM's own default for the device; of a GPU that is not in this machine, for most."""
    if device.type != "cuda":
        return DEFAULT_SLOTS
    import torch

    if not torch.cuda.is_available():
        return DEFAULT_SLOTS
    gpu = torch.cuda.get_device_properties(device)
    large = gpu.total_memory >= LARGE_GPU and "a100" not in gpu.name.lower()
    return LARGE_GPU_SLOTS if large else DEFAULT_SLOTS
