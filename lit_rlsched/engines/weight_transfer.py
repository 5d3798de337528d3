"""Sends weights from the trainer's GPU to those of engines, with vLLM's weight-transfer API.

vLLM's own trainer side (`TrainerWeightTransferEngine`) is not used: 0.27.1 has none and 0.33 has
another one than 0.32, what it sends cannot be broken off when an engine dies, and over CUDA IPC all
ranks of the trainer call it, while here rank 0 leads. The calls in the engine's process are in
`_vllm_worker.py`. Nothing here has run on a GPU; the lines that need one are `_open`, `_broadcast`
and `handle_of`.
"""

import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines._vllm_worker import gpu_of, open_group
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.child import ReplacedEngine
from lit_rlsched.engines.spec import EngineDied, EngineSpec, Weights
from lit_rlsched.engines.weights import (
    HandedWeights,
    Named,
    PackedWeights,
    WeightSource,
    WeightsStore,
    buckets,
    rounded,
)
from lit_rlsched.ranks import Team
from lit_rlsched.settings import UsageError

GRACE = 10.0
"""Seconds to find out which engine has died after something else failed."""


def pack(group: Iterable[Named], last: bool) -> PackedWeights:
    """Copy tensors of one device into a buffer there, and wait until it is written."""
    # wide types first: every tensor then begins at a multiple of its element's size
    ordered = sorted(group, key=lambda pair: -pair[1].element_size())
    tensors = [tensor.detach() for _, tensor in ordered]
    data = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    if data.is_cuda:  # gathering has ended too, before anything is sent
        torch.cuda.current_stream(data.device).synchronize()
    names, shapes = [name for name, _ in ordered], [list(tensor.shape) for tensor in tensors]
    return PackedWeights(names, [tensor.dtype for tensor in tensors], shapes, data, last)


def packed_weights(
    named: Iterable[Named], dtype: torch.dtype, gpus: Collection[str], team: Team
) -> Iterator[PackedWeights]:
    """Pack weights into buckets on each rank; the leader yields every bucket.

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


def handle_of(data: Tensor) -> dict[str, tuple[Any, ...]]:
    """Export a tensor by CUDA IPC; return what another process opens it with, by UUID."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(data)
    return {gpu_of(data.device): arguments}


class WeightTransfer(WeightsStore):
    """Sends weights to all engines of a run, bucket by bucket.

    With `ipc`, engines read the buffers of the ranks on their GPUs; with `nccl`, rank 0 broadcasts
    to engines on GPUs of their own, on any node. A sync asks all engines first whether they are
    ready. Then all ranks gather a bucket and finish it, and each engine is sent one message for it.
    An engine that dies ends the run.
    """

    def __init__(self, kind: str, spec: EngineSpec, engines: Sequence[ReplacedEngine]) -> None:
        self._nccl, self._engines, self._device = kind == "nccl", engines, spec.device
        self._setting = f"`{type(engines[0]).__name__}(weight_transfer={kind!r})`"
        if spec.device.type != "cuda":
            raise UsageError(
                f"{self._setting}: the run is on {spec.device.type}, and this sends weights from "
                "GPU to GPU. Leave `weight_transfer` out."
            )
        self._gpus: list[list[str]] = []
        """UUIDs of the GPUs of each engine, once they are connected."""
        self._group: Any = None

    def write(self, named_tensors: Weights, dtype: torch.dtype | None = None) -> HandedWeights:
        """Send the weights to all engines and wait until they are loaded."""
        assert isinstance(named_tensors, WeightSource) and dtype is not None
        with torch.no_grad(), torch.cuda.device(self._device):
            gpus = self._ask([("gpus",)] * len(self._engines))  # all workers answer: all are ready
            if not self._gpus:
                self._check_gpus(gpus)
                self._meet([len(own) for own in gpus])
                self._gpus = gpus
            readers = [] if self._nccl else [gpu for own in gpus for gpu in own]
            with closing(named_tensors.packed(dtype, readers)) as packed:
                for number, bucket in enumerate(packed):
                    self._pass_on(bucket, first=number == 0)
        return HandedWeights()

    def close(self) -> None:
        """Disconnect the engines; a broadcast that waits for one ends."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def _check_gpus(self, gpus: list[list[str]]) -> None:
        """Refuse engines that share a GPU, with each other or with NCCL's rank 0."""
        trainer, seen = gpu_of(self._device), dict[str, str]()
        for engine, own in zip(self._engines, gpus, strict=True):
            for gpu in own:
                if gpu in seen:
                    raise UsageError(
                        f"{self._setting}: {seen[gpu]} and {engine.numbered_name} are both on "
                        f"{gpu}, and vLLM's weight transfer takes each GPU once. Lower "
                        "`num_engines`, or leave `weight_transfer` out."
                    )
                if self._nccl and gpu == trainer:
                    raise UsageError(
                        f"{self._setting}: {engine.numbered_name} is on {gpu}, the trainer's own "
                        f"GPU, and NCCL takes each GPU once. {engine.gpus_advice}, or use "
                        "`weight_transfer='ipc'`."
                    )
                seen[gpu] = engine.numbered_name

    def _meet(self, sizes: list[int]) -> None:
        """Connect the trainer with the engines, which have so many workers."""
        if not self._nccl:
            self._ask([("join_transfer", {})] * len(sizes))
            return
        guest.import_vllm()  # not in a thread, where a module may not set signal handlers
        address = self._engines[0].trainer_address
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        *offsets, world = accumulate(sizes, initial=1)  # rank 0 is the trainer
        common = {"master_address": address, "master_port": port, "world_size": world}
        messages = [("join_transfer", {**common, "rank_offset": offset}) for offset in offsets]
        self._ask(messages, partial(self._open, common))

    def _open(self, where: dict[str, Any]) -> None:
        with torch.cuda.device(self._device):  # of this thread
            self._group = open_group(where)

    def _pass_on(self, bucket: PackedWeights, first: bool) -> None:
        """Send a bucket and wait until it is loaded."""
        update = bucket.described
        if not self._nccl:
            for engine, own in zip(self._engines, self._gpus, strict=True):
                if missing := [gpu for gpu in own if gpu not in bucket.handles]:
                    raise UsageError(
                        f"{self._setting}: no rank of the trainer is on {missing[0]}, the GPU of "
                        f"{engine.numbered_name}. Train on as many `devices` as there are GPUs of "
                        "engines, or use `weight_transfer='nccl'` with engines on GPUs of their "
                        "own."
                    )
            update |= {"tensor_sizes": bucket.sizes, "ipc_handles": bucket.handles}
        messages = [("receive_weights", update, first, bucket.last)] * len(self._engines)
        self._ask(messages, partial(self._broadcast, bucket.data) if self._nccl else None)

    def _broadcast(self, data: Tensor) -> None:
        with torch.no_grad(), torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # one that never ends must not hold up the trainer's
            self._group.broadcast(data, src=0, stream=stream)
            stream.synchronize()

    def _ask(
        self, messages: Sequence[tuple[Any, ...]], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """Ask each engine, while `meanwhile` runs in another thread; return the answers."""
        calls = [
            in_thread(engine.child.call, "engine", *message)
            for engine, message in zip(self._engines, messages, strict=True)
        ]
        every = [*calls, in_thread(meanwhile)] if meanwhile else calls
        done, _ = wait(every, return_when=FIRST_EXCEPTION)
        if any(call.exception() for call in done):
            self.close()  # what is under way ends
            wait(calls, timeout=GRACE)
        for engine, call in zip(self._engines, calls, strict=True):
            if call.done() and isinstance(call.exception(), EngineDied):
                engine.revive()  # which says how it ended
        return [call.result() for call in every if call.done()][: len(calls)]


def check_transfer(setting: str | None, engine: RolloutEngine, owner: str) -> None:
    """Refuse a transfer that this engine cannot receive."""
    if setting is None:
        return
    said = f"`{owner}(weight_transfer={setting!r})`"
    if not hasattr(engine, "receive_weights"):
        raise UsageError(
            f"{said}: this is vLLM's, and `{type(engine).__name__}` has no part in it. Leave "
            "`weight_transfer` out, or use `VLLMEngine`."
        )
    if engine.enable_lora:
        raise UsageError(
            f"{said} with `VLLMEngine(enable_lora=True)`: vLLM receives whole weights, no adapters "
            "alone. Leave one of the two out."
        )


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run a call in a thread that does not keep the process alive if it never ends."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight-transfer").start()
    return future
