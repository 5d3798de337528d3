"""Memory of a GPU that the trainer and an engine take turns in."""

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def give_back(device: "torch.device | None") -> None:
    """Return what PyTorch's allocator keeps in this process, so that another process can have it.

    An engine that wakes up does that itself, in the process that its model is in.
    """
    if device is not None and device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
