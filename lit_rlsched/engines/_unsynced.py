"""Tensors of a model that a weight sync does not write."""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

Copies = list[tuple[Tensor, Tensor]]
"""Tensors, each with a copy of it on the host."""


def unsynced(model: torch.nn.Module, written: Collection[str]) -> list[Tensor]:
    """Parameters that are not among `written`, and tensors that are no parameters or buffers.

    Such are plain attributes of layers and of their attention: scales of norms that have none to
    learn, ALiBi slopes. The key-value cache is none of them.
    """
    parameters = dict(model.named_parameters())
    found: list[Tensor] = [each for name, each in parameters.items() if name not in written]
    known = {_storage(each) for each in (*parameters.values(), *model.buffers())}
    device = next(iter(parameters.values())).device
    for module in model.modules():
        for tensor in _attributes(module):
            if tensor.device == device and tensor.numel() and _storage(tensor) not in known:
                known.add(_storage(tensor))
                found.append(tensor)
    return found


def copies(tensors: Iterable[Tensor]) -> Copies:
    """Copy tensors to the host."""
    return [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]


def copy_back(copies: Copies) -> None:
    """Fill the same memory again."""
    for tensor, copy in copies:
        tensor.data.copy_(copy)
    copies.clear()


def _attributes(owner: object, deeper: bool = True) -> Iterator[Tensor]:
    """Tensors among the attributes of an object, in their lists too, and in theirs in turn."""
    for name, value in vars(owner).items():
        if name == "kv_cache":
            continue
        several = value.values() if isinstance(value, dict) else value
        for each in several if isinstance(value, dict | list | tuple) else (value,):
            if isinstance(each, Tensor):
                yield each
            elif deeper and hasattr(each, "__dict__") and not isinstance(each, torch.nn.Module):
                yield from _attributes(each, deeper=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
