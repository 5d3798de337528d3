"""Tensors of which each rank may hold only a part."""

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; all ranks must call this."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if callable(gather) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    part = getattr(tensor, "to_local", None)
    return part() if callable(part) else tensor
