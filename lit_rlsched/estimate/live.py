"""Counting bytes: of tensors while a step runs, on fake tensors or true ones, and of objects."""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_rlsched.module import PolicyModule
from lit_rlsched.training.logprobs import CHUNK_BYTES


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that were allocated inside it and are still alive.

    What was there before (weights, gradients) is not counted. An operation's own scratch memory is
    not seen; that of the fused kernels (attention, matrix products) is small.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        """The most there were."""
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._add(tensor, counted=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._add(tensor)
        return out

    def _add(self, tensor: torch.Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            size = storage.nbytes() if counted else 0
            self._seen.add(storage._cdata)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each once: tied weights are one."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def configure_without_weights(module: PolicyModule) -> None:
    """Run the module's own `configure_model` on shapes alone, made from `config.json`.

    Raises:
        ValueError: there is no such checkpoint, or the module refuses its settings.
    """
    with torch.device("meta"):
        module.configure_model()


def make_fake(*roots: nn.Module) -> None:
    """Put fake tensors in place of a model's: they compute shapes, types and lifetimes, no values.

    Real tensors may be mixed with them: lengths and masks stay real, which the code looks at.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty

    for part in (part for root in roots for part in root.modules()):
        for group in (part._parameters, part._buffers):
            for name, tensor in group.items():
                if tensor is not None:
                    if tensor not in fakes:
                        fakes[tensor] = fake(tensor)
                    group[name] = fakes[tensor]  # type: ignore[assignment]


@contextmanager
def chunks_as_on(device: str) -> Iterator[None]:
    """Score as many positions at a time as on that device: fake tensors are the CPU's."""
    before = CHUNK_BYTES["cpu"]
    CHUNK_BYTES["cpu"] = CHUNK_BYTES[device]
    try:
        yield
    finally:
        CHUNK_BYTES["cpu"] = before


def object_bytes(*roots: Any) -> int:
    """Bytes of plain Python objects and of all they refer to, each once."""
    seen: set[int] = set()
    waiting, total = list(roots), 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif is_dataclass(item):
            waiting += [getattr(item, f.name) for f in fields(item)]
    return total
