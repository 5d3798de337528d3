"""Memory of a GPU that the trainer and an engine take turns in."""

import gc

import torch


def give_back(device: torch.device) -> None:
    """Return what PyTorch's allocator keeps in this process, so that another process can have it.

    An engine that wakes up does that itself, in the process that its model is in.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
