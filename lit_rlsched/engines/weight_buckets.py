"""Packs weights into buckets of bytes, as vLLM's weight-transfer API takes them."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lit_rlsched.engines.shared_weights import rounded
from lit_rlsched.team import Team

BUCKET = 2**30
"""Maximum bytes of a bucket; a larger tensor is a bucket of its own."""

Named = tuple[str, Tensor]


class WeightSource(ABC):
    """The weights of a policy. Every pass reads them again, on all ranks at once."""

    @abstractmethod
    def __iter__(self) -> Iterator[Named]:
        """Yield the whole tensors under their checkpoint names."""

    @abstractmethod
    def packed(
        self, dtype: torch.dtype, gpus: Collection[str]
    ) -> Generator["PackedWeights", None, None]:
        """Yield the same tensors in buckets.

        Args:
            dtype: Precision of the engines; see `WeightsStore.write`.
            gpus: UUIDs of the GPUs on which engines read the buckets by CUDA IPC; empty if they do
                not.
        """


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
    handles: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """CUDA IPC handles of this buffer, and of the same on other ranks, by UUID of the GPU."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in pairs]


def buckets(named: Iterable[Named], limit: int = BUCKET) -> Iterator[tuple[list[Named], bool]]:
    """Group tensors in their order so that no group has more bytes than `limit`, if it can be.

    Yields:
        A group, and whether it is the last.
    """
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


def pack(group: Iterable[Named], last: bool) -> PackedWeights:
    """Copy tensors of one device into a buffer there, and wait until it is written."""
    # wide types first: every tensor then begins at a multiple of its element's size
    ordered = sorted(group, key=lambda pair: -pair[1].element_size())
    tensors = [tensor.detach() for _, tensor in ordered]
    data = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    if data.is_cuda:  # gathering has ended too, before anything is sent
        torch.cuda.current_stream(data.device).synchronize()
    return PackedWeights(
        names=[name for name, _ in ordered],
        dtypes=[tensor.dtype for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
        data=data,
        last=last,
    )


def packed_weights(
    named: Iterable[Named], dtype: torch.dtype, gpus: Collection[str], team: Team
) -> Iterator[PackedWeights]:
    """Do the work of `WeightSource.packed` on each rank; the leader yields every bucket.

    For CUDA IPC, every rank on one of `gpus` fills a buffer of its own and keeps it until the
    leader asks for the next bucket.
    """
    for group, last in buckets(rounded(named, dtype)):
        exports = bool(gpus) and gpu_of(group[0][1].device) in gpus
        packed = pack(group, last) if team.leads or exports else None
        group.clear()  # a gathered tensor is not needed any more
        if gpus:
            own = handle_of(packed.data) if exports and packed is not None else {}
            handles = {gpu: h for of_rank in team.all_gather(own) for gpu, h in of_rank.items()}
            packed = packed and replace(packed, handles=handles)
        if packed is not None:
            yield packed
        if gpus:
            team.all_gather(None)  # the engines have read the bucket
    if gpus:
        torch.cuda.ipc_collect()


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, by which vLLM names it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def handle_of(data: Tensor) -> dict[str, tuple[Any, ...]]:
    """Export a tensor by CUDA IPC; return what another process opens it with, by UUID."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(data)
    return {gpu_of(data.device): arguments}
