"""Sends weights from the trainer's GPU to those of engines, with vLLM's weight-transfer API.

The calls in the engine's process are in `_vllm_receiver.py`. vLLM's own trainer side is not used:
it differs from release to release, and its clients give all engines the same ranks. Nothing here
has run on a GPU; the lines that need one are `NCCLTransfer._open`, `NCCLTransfer._broadcast` and
`weights.handle_of`.
"""

import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.child import Child, HasChild
from lit_rlsched.engines.spec import EngineDied, EngineSpec, Weights
from lit_rlsched.engines.weights import (
    HandedWeights,
    PackedWeights,
    WeightSource,
    WeightsStore,
    gpu_of,
)
from lit_rlsched.settings import UsageError

Placed = Sequence[tuple[HasChild, list[str]]]
"""Engines, and the UUIDs of the GPUs that each is on."""
GRACE = 10.0
"""Seconds for the other engines to answer after one has died. Engines that still wait for it in
NCCL are replaced too."""


@dataclass(frozen=True)
class SentWeights(HandedWeights):
    """Weights that the engines have. They are sent again to one that is replaced."""

    source: WeightSource
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.source)


class SomeDied(Exception):
    """Engines died while weights were sent."""

    def __init__(self, engines: Sequence[HasChild]) -> None:
        super().__init__()
        self.engines = engines


class WeightTransfer(WeightsStore):
    """Sends weights to all engines of a run, bucket by bucket.

    A sync asks all engines first whether they are ready. Then all ranks gather a bucket and finish
    it, and each engine is sent one message for it. If engines die, the trainer replaces them and
    sends everything to all engines again. Each answer has the time limit of a weight sync
    (`AnswerTimeouts`).

    Args:
        spec: Settings of the first engine, with the trainer's device.
        engines: The engines, which may not have started yet.

    Raises:
        UsageError: the engines do not run on GPUs.
    """

    backend: str

    def __init__(self, spec: EngineSpec, engines: Sequence[HasChild]) -> None:
        self._engines, self._device = engines, spec.device
        self._setting = f"`{type(engines[0]).__name__}(weight_transfer={self.backend!r})`"
        if spec.device.type != "cuda":
            raise UsageError(
                f"{self._setting}: the run is on {spec.device.type}, and this sends weights from "
                "GPU to GPU. Leave `weight_transfer` out."
            )
        self._lock = threading.Lock()  # engines may be replaced in several threads
        self._met: list[Child] = []
        """Processes of the engines that are connected."""

    def write(self, named_tensors: Weights, dtype: torch.dtype | None = None) -> SentWeights:
        """Send the weights to all engines.

        Raises:
            UsageError: the weights cannot be read a second time, should an engine be replaced.
        """
        if not isinstance(named_tensors, WeightSource):
            raise UsageError(f"{self._setting}: weights must come from a `WeightSource`.")
        assert dtype is not None
        for engine in self._engines:
            engine.forget_weights()  # one that is replaced meanwhile gets the new ones
        sent = SentWeights(named_tensors, dtype)
        self.send(sent, self._engines)
        return sent

    def send(self, weights: SentWeights, engines: Sequence[HasChild]) -> None:
        """Send weights to these engines and wait until they are loaded.

        Raises:
            RuntimeError: an engine keeps dying.
            UsageError: the engines' GPUs do not suit this backend.
        """
        with self._lock, self._on_device():
            while True:
                try:
                    return self._send(weights, engines)
                except SomeDied as died:
                    results([in_thread(engine.revive) for engine in died.engines])

    def close(self) -> None:
        """Disconnect the engines."""
        self._met = []

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the trainer's device the current one of this thread."""
        with torch.no_grad(), torch.cuda.device(self._device):
            yield

    def _send(self, weights: SentWeights, engines: Sequence[HasChild]) -> None:
        said = self._ask(engines, [("gpus",)] * len(engines))  # every worker answers: all are ready
        gpus = [*zip(engines, said, strict=True)]
        children = [engine.child for engine in engines]
        if children != self._met:
            self.close()
            check_gpus(gpus, self._setting)
            self._meet(gpus)
            self._met = children
        first = True
        with closing(weights.source.packed(weights.dtype, self._readers(gpus))) as packed:
            for bucket in packed:
                self._pass_on(bucket, gpus, first)
                first = False
        for engine in engines:
            engine.stepped()

    @abstractmethod
    def _meet(self, gpus: Placed) -> None:
        """Connect the trainer with these engines, whose GPUs are given."""

    @abstractmethod
    def _readers(self, gpus: Placed) -> list[str]:
        """GPUs on which engines read buckets by CUDA IPC."""

    @abstractmethod
    def _pass_on(self, bucket: PackedWeights, gpus: Placed, first: bool) -> None:
        """Send a bucket and wait until it is loaded."""

    def _ask(
        self,
        engines: Sequence[HasChild],
        messages: Sequence[tuple[Any, ...]],
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Ask each engine, while `meanwhile` runs in another thread; return the answers."""
        calls = [
            in_thread(engine.child.call, "engine", *message)
            for engine, message in zip(engines, messages, strict=True)
        ]
        own = [in_thread(meanwhile)] if meanwhile is not None else []
        done, _ = wait([*calls, *own], return_when=FIRST_EXCEPTION)
        if any(call.exception() for call in done):
            self.close()  # what is under way ends
            wait(calls, timeout=GRACE)
            if any(call.done() and isinstance(call.exception(), EngineDied) for call in calls):
                for engine, call in zip(engines, calls, strict=True):
                    if not call.done():
                        engine.child.link.kill()
                wait(calls)
            ended = [(e, c.exception()) for e, c in zip(engines, calls, strict=True) if c.done()]
            if died := [engine for engine, error in ended if isinstance(error, EngineDied)]:
                raise SomeDied(died)
        return results([call for call in (*calls, *own) if call.done()])[: len(calls)]


class IPCTransfer(WeightTransfer):
    """Lets engines read the trainer's buffers by CUDA IPC: each engine is on the GPU of a rank."""

    backend = "ipc"

    def _meet(self, gpus: Placed) -> None:
        engines = [engine for engine, _ in gpus]
        self._ask(engines, [("join_transfer", {})] * len(engines))

    def _readers(self, gpus: Placed) -> list[str]:
        return [gpu for _, own in gpus for gpu in own]

    def _pass_on(self, bucket: PackedWeights, gpus: Placed, first: bool) -> None:
        for engine, own in gpus:
            if missing := [gpu for gpu in own if gpu not in bucket.handles]:
                raise UsageError(
                    f"{self._setting}: no rank of the trainer is on {missing[0]}, the GPU of "
                    f"{engine.numbered_name}. Train on as many `devices` as there are GPUs of "
                    "engines, or use `weight_transfer='nccl'` with engines on GPUs of their own."
                )
        update = {**described(bucket), "tensor_sizes": bucket.sizes, "ipc_handles": bucket.handles}
        message = ("receive_weights", update, first, bucket.last)
        self._ask([engine for engine, _ in gpus], [message] * len(gpus))


class NCCLTransfer(WeightTransfer):
    """Broadcasts buckets over NCCL to engines on GPUs of their own, on any node."""

    backend = "nccl"

    def __init__(self, spec: EngineSpec, engines: Sequence[HasChild]) -> None:
        super().__init__(spec, engines)
        self._group: Any = None

    def close(self) -> None:
        """Leave the group; a broadcast that waits for an engine ends."""
        super().close()
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def _meet(self, gpus: Placed) -> None:
        own = gpu_of(self._device)
        for engine, theirs in gpus:
            if own in theirs:
                raise UsageError(
                    f"{self._setting}: {engine.numbered_name} is on {own}, the trainer's own GPU, "
                    f"and NCCL takes each GPU once. {engine.gpus_advice}, or use "
                    "`weight_transfer='ipc'`."
                )
        guest.import_vllm()  # not in a thread, where a module may not set signal handlers
        address = gpus[0][0].trainer_address
        port, sizes = free_port(address), [len(theirs) for _, theirs in gpus]
        world = 1 + sum(sizes)
        common = {"master_address": address, "master_port": port, "world_size": world}
        messages = [
            ("join_transfer", {**common, "rank_offset": offset}) for offset in rank_offsets(sizes)
        ]
        self._ask([e for e, _ in gpus], messages, lambda: self._open(address, port, world))

    def _readers(self, gpus: Placed) -> list[str]:
        return []

    def _pass_on(self, bucket: PackedWeights, gpus: Placed, first: bool) -> None:
        message = ("receive_weights", described(bucket), first, bucket.last)
        broadcast = partial(self._broadcast, bucket.data)
        self._ask([engine for engine, _ in gpus], [message] * len(gpus), broadcast)

    def _open(self, address: str, port: int, world_size: int) -> None:
        from lit_rlsched.engines._vllm_receiver import open_group

        with self._on_device():
            self._group = open_group(address, port, world_size)

    def _broadcast(self, data: torch.Tensor) -> None:
        with self._on_device():
            stream = torch.cuda.Stream()  # one that never ends must not hold up the trainer's
            self._group.broadcast(data, src=0, stream=stream)
            stream.synchronize()


TRANSFERS: dict[str, type[WeightTransfer]] = {"ipc": IPCTransfer, "nccl": NCCLTransfer}


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


def check_gpus(gpus: Placed, setting: str) -> None:
    """Refuse engines that share a GPU."""
    seen: dict[str, str] = {}
    for engine, own in gpus:
        for gpu in own:
            if gpu in seen:
                raise UsageError(
                    f"{setting}: {seen[gpu]} and {engine.numbered_name} are both on {gpu}, and "
                    "vLLM's weight transfer takes each GPU once. Lower `num_engines`, or leave "
                    "`weight_transfer` out."
                )
            seen[gpu] = engine.numbered_name


def rank_offsets(sizes: Sequence[int]) -> list[int]:
    """Return the NCCL rank of each engine's first worker; rank 0 is the trainer."""
    return [1 + sum(sizes[:index]) for index in range(len(sizes))]


def described(bucket: PackedWeights) -> dict[str, Any]:
    """The metadata of a bucket that vLLM needs."""
    return {
        "names": bucket.names,
        "dtype_names": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        "shapes": bucket.shapes,
    }


def free_port(address: str) -> int:
    """Return a port of this node that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


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


def results(calls: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of calls, or raise the first error once all have ended."""
    wait(calls)
    return [call.result() for call in calls]
