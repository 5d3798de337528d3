"""Sends weights from the trainer's GPU to those of engines, with vLLM's weight-transfer API.

vLLM's own trainer side (`TrainerWeightTransferEngine`) is not used: 0.27.1 has none and 0.33 has
another one than 0.32, and what it sends cannot be broken off when an engine dies. The calls in the
engine's process are in `_vllm_worker.py`. Nothing here has run on a GPU; the lines that need one
are `_open` and `_broadcast`.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines._vllm_worker import gpu_of, open_group
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.child import OtherProcess
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
    named: Iterable[Named], dtype: torch.dtype, team: Team
) -> Iterator[PackedWeights]:
    """Gather weights bucket by bucket on all ranks; the leader packs and yields them."""
    for group, last in buckets(rounded(named, dtype)):
        packed = pack(group, last) if team.leads else None
        group.clear()  # a gathered tensor is not needed any more
        if packed is not None:
            yield packed


class WeightTransfer(WeightsStore):
    """Sends weights to all engines of a run, bucket by bucket.

    Rank 0 broadcasts by NCCL to engines on GPUs of their own, on any node. A sync asks all engines
    first whether they are ready. Then all ranks gather a bucket and finish it, and each engine is
    sent one message for it. An engine that dies ends the run.
    """

    def __init__(self, spec: EngineSpec, engines: Sequence[OtherProcess]) -> None:
        self._engines, self._device = engines, spec.device
        self._setting = f"`{type(engines[0]).__name__}(weight_transfer='nccl')`"
        if spec.device.type != "cuda":
            raise UsageError(
                f"{self._setting}: the run is on {spec.device.type}, and this sends weights from "
                "GPU to GPU. Leave `weight_transfer` out."
            )
        self._group: Any = None

    def write(self, named_tensors: Weights, dtype: torch.dtype | None = None) -> HandedWeights:
        """Send the weights to all engines and wait until they are loaded."""
        assert isinstance(named_tensors, WeightSource) and dtype is not None
        with torch.no_grad(), torch.cuda.device(self._device):
            gpus = self._ask([("gpus",)] * len(self._engines))  # all workers answer: all are ready
            if self._group is None:
                self._check_gpus(gpus)
                self._meet([len(own) for own in gpus])
            with closing(named_tensors.packed(dtype)) as packed:
                for number, bucket in enumerate(packed):
                    message = "receive_weights", bucket.described, number == 0, bucket.last
                    self._ask([message] * len(gpus), partial(self._broadcast, bucket.data))
        return HandedWeights()

    def close(self) -> None:
        """Disconnect the engines; a broadcast that waits for one ends."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def _check_gpus(self, gpus: list[list[str]]) -> None:
        """Refuse engines that share a GPU, with each other or with rank 0."""
        trainer, seen = gpu_of(self._device), dict[str, str]()
        for engine, own in zip(self._engines, gpus, strict=True):
            for gpu in own:
                if gpu in seen:
                    raise UsageError(
                        f"{self._setting}: {seen[gpu]} and {engine.numbered_name} are both on "
                        f"{gpu}, and NCCL takes each GPU once. Lower `num_engines`, or leave "
                        "`weight_transfer` out."
                    )
                if gpu == trainer:
                    raise UsageError(
                        f"{self._setting}: {engine.numbered_name} is on {gpu}, the trainer's own "
                        f"GPU, and NCCL takes each GPU once. {engine.gpus_advice}, or "
                        "leave `weight_transfer` out."
                    )
                seen[gpu] = engine.numbered_name

    def _meet(self, sizes: list[int]) -> None:
        """Connect the trainer with the engines, which have so many workers."""
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
