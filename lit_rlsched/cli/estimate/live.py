"""Counts of bytes: tensors that are alive (real or fake), Python objects, and devices."""

import gc
import os
import re
import sys
import weakref
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_rlsched.settings import UsageError
from lit_rlsched.text import parse_bytes


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensor storages that are allocated inside this context.

    Storages from before, such as weights and gradients, do not count. Scratch memory inside an
    operation is not seen; it is small for fused attention and matrix products.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes alive now."""
        self.peak = 0
        """Maximum number of bytes alive at once."""
        self._seen: set[int] = set()

    def __enter__(self) -> Self:
        """Start to count."""
        gc.collect(1)  # so that young reference cycles free nothing meanwhile
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add((args, kwargs), counted=False)
        out = func(*args, **(kwargs or {}))
        self._add(out)
        return out

    def _add(self, tree: Any, counted: bool = True) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor):
                continue
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


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; tied weights share one and count once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def make_fake(*models: nn.Module) -> None:
    """Replace the tensors of models by fake ones, which have no values and take no memory.

    Operations on them compute shapes, types and lifetimes. They may be mixed with real tensors,
    such as the lengths and masks whose values the code reads.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @cache  # so that tied weights stay tied
    def fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty

    for part in (part for model in models for part in model.modules()):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)  # type: ignore[assignment]


def object_bytes(*roots: Any) -> int:
    """Return the bytes of plain Python objects and of all that they refer to, each once."""
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


def device_memory(device: str, given: str | None = None) -> int:
    """Return the memory of the device in bytes.

    Args:
        device: Type of the device.
        given: Size such as `24GiB`. By default the GPU's total memory, or the available main
            memory of this machine.

    Raises:
        UsageError: `given` is not a size, or this machine has no GPU to ask.
    """
    if given is not None:
        return parse_bytes(given, "memory")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "`memory=None`: this machine has no GPU. Give the memory of the GPU that the run "
                "will use, such as `--memory 24GiB`."
            )
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        (line,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(line) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
