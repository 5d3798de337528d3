"""Hands weights to engines in other processes: through shared memory or Ray's object store."""

import os
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rlsched.engines.spec import Weights

Named = tuple[str, Tensor]
_ALIGNMENT = 64
STORED = 64 * 2**20
"""Maximum bytes of weights in an object of Ray's store; a larger tensor is alone in one."""


class HandedWeights:
    """Named tensors that another process can read; none, if it has been sent them."""

    def __iter__(self) -> Iterator[Named]:
        """Yield names and tensors, without a copy where the memory is shared."""
        return iter(())


class WeightsStore(ABC):
    """Holds one version of the weights for other processes."""

    @abstractmethod
    def write(self, named_tensors: Weights, dtype: torch.dtype | None = None) -> HandedWeights:
        """Replace the content; no process may be reading it.

        Args:
            named_tensors: The weights, on any device. They are taken one at a time, as merged
                adapters are large.
            dtype: Precision of the reader. Wider matrices are rounded to it on their device;
                vectors (norms, biases) and routers of experts are not, as engines keep some of them
                in fp32.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory as soon as no process reads it."""


@dataclass(frozen=True)
class SharedWeights(HandedWeights):
    """Named tensors that any process of this machine can map."""

    path: str
    size: int
    index: list[tuple[str, torch.dtype, torch.Size, int]]
    """Name, type, shape and first byte of each tensor."""

    def __iter__(self) -> Iterator[Named]:
        """Yield names and tensors, mapped without a copy."""
        memory = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        for name, dtype, shape, start in self.index:
            bytes_ = memory[start : start + shape.numel() * dtype.itemsize]
            yield name, bytes_.view(dtype).view(shape)


class WeightsFile(WeightsStore):
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

    def write(self, named_tensors: Weights, dtype: torch.dtype | None = None) -> SharedWeights:
        index, end = [], 0
        with open(self._descriptor, "wb", closefd=False) as file:
            file.seek(0)
            for name, tensor in rounded(named_tensors, dtype):
                index.append((name, tensor.dtype, tensor.shape, end))
                file.seek(end)
                end += file.write(_bytes(tensor))
                end += -end % _ALIGNMENT
            file.truncate(end)
        return SharedWeights(self._path, end, index)

    def close(self) -> None:
        os.close(self._descriptor)
        with suppress(OSError):
            if not self._path.startswith("/proc/"):
                os.unlink(self._path)


@dataclass(frozen=True)
class StoredWeights(HandedWeights):
    """Named tensors in Ray's object store, which any node of the cluster can read."""

    buckets: list[tuple[Any, list[tuple[str, torch.dtype, torch.Size]]]]
    """References of lists of arrays, with name, type and shape of each tensor."""

    def __iter__(self) -> Iterator[Named]:
        import ray

        fetched = ray.get([reference for reference, _ in self.buckets])
        for arrays, (_, index) in zip(fetched, self.buckets, strict=True):
            for array, (name, dtype, shape) in zip(arrays, index, strict=True):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it can only be read
                    bytes_ = torch.from_numpy(array)
                yield name, bytes_.view(dtype).view(shape)


class ObjectStore(WeightsStore):
    """Ray's object store: weights are copied once to each node that reads them."""

    def __init__(self) -> None:
        self._weights = StoredWeights([])

    def write(self, named_tensors: Weights, dtype: torch.dtype | None = None) -> StoredWeights:
        import ray

        self.close()
        self._weights = StoredWeights([])
        on_host = ((name, tensor.detach().cpu()) for name, tensor in rounded(named_tensors, dtype))
        for group, _ in buckets(on_host, STORED):
            index = [(name, tensor.dtype, tensor.shape) for name, tensor in group]
            reference = ray.put([_bytes(tensor) for _, tensor in group])
            self._weights.buckets.append((reference, index))
        return self._weights

    def close(self) -> None:
        self._weights.buckets.clear()  # the store frees what has no reference


def rounded(named_tensors: Weights, dtype: torch.dtype | None) -> Iterator[Named]:
    """Round tensors as `WeightsStore.write` says."""
    for name, tensor in named_tensors:
        if dtype is not None and tensor.is_floating_point() and tensor.ndim > 1:
            wider = tensor.element_size() > dtype.itemsize
            if wider and not {"gate", "router"} & {*name.split(".")}:
                tensor = tensor.detach().to(dtype)
        yield name, tensor


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the content of a tensor as an array of bytes."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


BUCKET = 2**30
"""Maximum bytes of a bucket; a larger tensor is a bucket of its own."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Several tensors in one buffer."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[list[int]]
    data: Tensor
    """Their bytes, one tensor after the other, `[bytes]`."""
    last: bool
    """Whether no bucket follows."""

    @property
    def described(self) -> dict[str, Any]:
        """The metadata that vLLM needs."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return {"names": self.names, "dtype_names": dtypes, "shapes": self.shapes}


class WeightSource(ABC):
    """The weights of a policy. Every pass reads them again, on all ranks at once."""

    @abstractmethod
    def __iter__(self) -> Iterator[Named]:
        """Yield the whole tensors under their checkpoint names."""

    @abstractmethod
    def packed(self, dtype: torch.dtype) -> Generator[PackedWeights, None, None]:
        """Yield the same tensors in buckets; `dtype` is that of `WeightsStore.write`."""


def buckets(named: Iterable[Named], limit: int = BUCKET) -> Iterator[tuple[list[Named], bool]]:
    """Group tensors in their order; only a single larger tensor exceeds `limit` bytes."""
    group: list[Named] = []
    size = 0
    for name, tensor in named:
        if group and size + tensor.nbytes > limit:
            yield group, False
            group, size = [], 0
        group.append((name, tensor))
        size += tensor.nbytes
    if group:
        yield group, True
