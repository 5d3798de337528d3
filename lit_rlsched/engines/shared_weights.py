"""Hands weights to another process through shared memory."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class SharedWeights:
    """Named tensors that any process of this machine can map."""

    path: str
    size: int
    index: list[tuple[str, torch.dtype, torch.Size, int]]
    """Name, type, shape and first byte of each tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, mapped without a copy."""
        memory = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        for name, dtype, shape, start in self.index:
            bytes_ = memory[start : start + shape.numel() * dtype.itemsize]
            yield name, bytes_.view(dtype).view(shape)


class WeightsFile:
    """Shared memory that weights are written to.

    On Linux it is anonymous: it is freed with the process and not limited by the size of `/dev/shm`
    (64 MB in many containers). Elsewhere it is a temporary file.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("lit_rlsched-weights")
            self._path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self._path = tempfile.mkstemp(prefix="lit_rlsched-weights-")

    def write(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
    ) -> SharedWeights:
        """Replace the content; no process may be reading it.

        Args:
            named_tensors: The weights, on any device. They are taken one at a time, as merged
                adapters are large.
            dtype: Precision of the reader. Wider matrices are rounded to it on their device;
                vectors (norms, biases) and routers of experts are not, as engines keep some of them
                in fp32.
        """
        index, end = [], 0
        with open(self._descriptor, "wb", closefd=False) as file:
            file.seek(0)
            for name, tensor in named_tensors:
                if dtype is not None and _may_be_rounded(name, tensor, dtype):
                    tensor = tensor.detach().to(dtype)
                index.append((name, tensor.dtype, tensor.shape, end))
                file.seek(end)
                content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                end += file.write(content.numpy())
                end += -end % _ALIGNMENT
            file.truncate(end)
        return SharedWeights(self._path, end, index)

    def close(self) -> None:
        """Free the memory as soon as no process maps it."""
        os.close(self._descriptor)
        with suppress(OSError):
            if not self._path.startswith("/proc/"):
                os.unlink(self._path)


def _may_be_rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    wider = tensor.is_floating_point() and tensor.element_size() > dtype.itemsize
    return wider and tensor.ndim > 1 and not {"gate", "router"} & {*name.split(".")}
