"""Runs any engine in a child process."""

import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.child import Child, PipeChild, pickled_engine
from lit_rlsched.engines.devices import available_cores, cores_of, give_back, variables_of
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.engines.spec import EngineDied, EngineSpec, EngineStats, Footprint, Partial, Sizes
from lit_rlsched.engines.weight_transfer import WeightTransfer, check_transfer
from lit_rlsched.engines.weights import HandedWeights, WeightsFile, WeightsStore
from lit_rlsched.processes import require_posix
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.settings import RunFailed, UsageError
from lit_rlsched.types import Event, Request

START, ANSWER = 1800.0, 600.0
"""Seconds for an engine to start, and for any other answer, after which it counts as hanging: the
first step of a kind may compile, and weights may be large."""
MAX_DEATHS = 3
"""The run stops when the process dies this many times without a step in between."""
CLOSED = "The engine is closed or was not started."


class ProcessEngine(RolloutEngine):
    """Runs another engine in a child process, so that it decodes while the trainer computes.

    The child process refills the slots itself. It keeps decoding as long as no decision of the
    trainer between two steps can change what is drawn; `StreamedTraining` needs that. Weights are
    handed over through shared memory, a second copy of them on the host.

    A process that dies, or that loses a worker process of vLLM, is replaced. The new process gets
    the same weights and resumes all requests from the tokens that the trainer has received. Their
    further tokens are drawn with other noise, unless the engine's noise has no state
    (`TransformersEngine`). A process that has not answered for 10 minutes, or 30 at its start, is
    killed and replaced in the same way. `rollout/engine_restarts` counts replacements. The run
    stops if the process dies three times without a step in between, and at once with
    `weight_transfer`, which keeps no copy of the weights.

    Args:
        engine: The engine to run; `VLLMEngine()` by default.
        weight_transfer: Way of the weights from the trainer's GPU to the engine's, by vLLM's
            weight-transfer API, in place of shared memory. With `nccl` it is on a GPU of its own,
            one after those of the trainer's ranks. It has not run on a GPU.

    Raises:
        UsageError: the engine cannot receive weights in this way; in `start`: the run is not on
            GPUs; in the first `sync_weights`: the GPUs do not suit.
        RunFailed: on Windows, or if the process keeps dying. Exceptions of the engine are raised
            as they are.

    Example::

        RolloutDataModule(..., engine=ProcessEngine(VLLMEngine(gpu_memory_utilization=0.5)))
    """

    decodes_by_itself = True
    gpus_advice = "Train on the first GPUs (`devices: 1`, not `devices: [1]`)"
    """How an engine gets a GPU of its own."""
    trainer_address = "127.0.0.1"
    """Address of the trainer's node, as the engine's node knows it."""
    _kind_of_store: type[WeightsStore] = WeightsFile
    """Through which weights reach the process."""

    def __init__(
        self, engine: RolloutEngine | None = None, weight_transfer: Literal["nccl"] | None = None
    ) -> None:
        if engine is None:
            from lit_rlsched.engines.vllm import VLLMEngine

            engine = VLLMEngine()
        if isinstance(engine, ProcessEngine):
            name = type(self).__name__
            inner = type(engine).__name__
            raise UsageError(f"`{name}(engine={inner}(...))`: one process is enough.")
        check_transfer(weight_transfer, engine, type(self).__name__)
        self.engine = engine
        self.weight_transfer = engine.weight_transfer = weight_transfer
        self.logprobs, self.enable_lora = engine.logprobs, engine.enable_lora
        self.kv_block, self.kv_capacity = engine.kv_block, engine.kv_capacity
        self.restarts = 0
        """Number of times the process was replaced."""
        self.deaths_in_a_row = 0
        """Number of times it has died without a step in between."""
        self._child: Child | None = None
        self._spec: EngineSpec | None = None
        self._transfer: WeightTransfer | None = None
        """Shared with the other engines of the run."""
        self._store: WeightsStore | None = None
        self._weights: tuple[HandedWeights, int] | None = None
        """The weights of the last sync, and their policy version."""

    @property
    def pid(self) -> int | None:
        """Process id of the child, if there is one."""
        return None if self._child is None else self._child.pid

    @property
    def numbered_name(self) -> str:
        """Name of the engine in messages."""
        assert self._spec is not None
        return self._spec.name

    @property
    def alive(self) -> bool:
        """Whether there is a process, or a dead one that can be replaced."""
        return self._child is not None

    def limit(self, starts: bool) -> float:
        """Seconds for the process to start, or to answer, after which it counts as hanging."""
        return START if starts else ANSWER

    @property
    def child(self) -> Child:
        """The engine's process; raises if the engine is closed or was not started."""
        if self._child is None:
            raise RuntimeError(CLOSED)
        return self._child

    @property
    def tensor_parallel_size(self) -> int:
        return self.engine.tensor_parallel_size

    @tensor_parallel_size.setter
    def tensor_parallel_size(self, size: int) -> None:
        self.engine.tensor_parallel_size = size

    def most_slots(self, spec: EngineSpec) -> int:
        return self.engine.most_slots(spec)

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        return self.engine.max_tensor_parallel_size(spec)

    def cache_dtype(self, spec: EngineSpec) -> torch.dtype:
        return self.engine.cache_dtype(replace(spec, policy=None))

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """The engine's memory, on a GPU that of one of its GPUs, and the weights handed over."""
        spec = replace(spec, policy=None)
        parts = self.tensor_parallel_size if spec.device.type == "cuda" else 1
        part = replace(sizes, parameters=sizes.parameters // parts)
        held = self.engine.footprint(spec, part)
        sent = sizes.parameters if spec.adapters is None else spec.adapters.parameters
        if self.weight_transfer is not None:
            sent = 0  # through the host
        divided = f", a part of {parts}" if parts > 1 else ""
        return replace(
            held,
            handed_over=sent * self.cache_dtype(spec).itemsize,
            how_weights=held.how_weights + divided,
            apart=spec.device.type == "cuda" and self.weight_transfer is not None,
        )

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        return self.engine.cache_tokens(spec, footprint, token_bytes)

    def reserve(self, spec: EngineSpec, engines: Sequence[RolloutEngine]) -> None:
        super().reserve(spec, engines)
        self._share_transfer(spec, engines)

    def _share_transfer(self, spec: EngineSpec, engines: Sequence[RolloutEngine]) -> None:
        if self.weight_transfer is None:
            return
        ours = [engine for engine in engines if isinstance(engine, ProcessEngine)]
        transfer = WeightTransfer(spec, ours)
        for engine in ours:
            engine._transfer = transfer

    def start(self, spec: EngineSpec) -> None:
        require_posix(f"`{type(self).__name__}`")
        if self.weight_transfer is not None and self._transfer is None:
            self.reserve(spec, [self])
        self._spec = replace(spec, policy=None)  # it loads its own weights
        self._store = self._transfer or self._kind_of_store()
        self.deaths_in_a_row = 0
        try:
            try:
                self._launch()
            except EngineDied:
                self.revive()
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        assert self._spec is not None
        engine = pickled_engine(self.engine)
        spec = self._spec
        give_back(spec.device)  # the trainer may have used the GPU since
        self._child = self._connect(spec)
        if spec.device.type == "cuda" and spec.engines + spec.first_gpu > 1:
            spec = replace(spec, device=torch.device("cuda", 0))  # the first that it sees
        self.kv_block, self.kv_capacity = self._child.call("start", engine, spec)
        if self._weights is not None:
            self._child.call("engine", "sync_weights", *self._weights)

    def _connect(self, spec: EngineSpec) -> Child:
        """Start a process for the engine."""
        variables = variables_of(spec, self.tensor_parallel_size, os.environ)
        cores = cores_of(spec, available_cores()) if spec.engines > 1 else None
        return PipeChild(self.limit, spec.name, variables, cores)

    def revive(self) -> None:
        """Replace the process, unless it dies too often; the next one gets the last weights."""
        how = self.child.kill()
        name = self.numbered_name
        if self.weight_transfer is not None:
            self.close()
            raise RunFailed(
                f"The process of {name} {how}. None takes its place with "
                f"`weight_transfer={self.weight_transfer!r}`, which keeps no copy of the weights. "
                "Resume from the last checkpoint, or leave `weight_transfer` out."
            )
        cause: Exception | None = None
        while True:
            self.deaths_in_a_row += 1
            if self.deaths_in_a_row >= MAX_DEATHS:
                self.close()
                raise RunFailed(
                    f"The process of {name} {how}, {self.deaths_in_a_row} times in a row. If it "
                    "was killed from outside, memory may have run out: give the key-value cache "
                    "less."
                ) from cause
            self.restarts += 1
            warnings.warn(
                f"The process of {name} {how}; another one takes its place and goes on from the "
                f"tokens received (restart {self.restarts}).",
                stacklevel=2,
            )
            try:
                return self._launch()
            except EngineDied:
                how, cause = self.child.kill(), None
            except Exception as error:  # the engine has started with these settings before
                self.child.kill()
                how, cause = f"did not start again ({error})", error

    def _ask(self, *message: Any) -> Any:
        """Ask the process, and replace it if it dies; it then has no requests."""
        try:
            return self.child.call(*message)
        except EngineDied:
            self.revive()
            raise

    def _insist(self, *message: Any) -> Any:
        """Ask the process, and the one that replaces it, until there is an answer."""
        while True:
            with suppress(EngineDied):
                answer = self._ask(*message)
                self.deaths_in_a_row = 0
                return answer

    def submit(self, requests: Sequence[Request]) -> None:
        self._ask("engine", "submit", requests)

    def step(self) -> list[Event]:
        events = self._ask("engine", "step")
        self.deaths_in_a_row = 0
        return events

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        try:
            return self._ask("engine", "abort", list(request_ids))
        except EngineDied:
            return {}

    def hand_over(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> HandedWeights:
        """Write the weights where the process can read them, or send them to all engines."""
        if self._store is None or self._spec is None:
            raise RuntimeError(CLOSED)
        return self._store.write(named_tensors, self.engine.cache_dtype(self._spec))

    def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if not isinstance(named_tensors, HandedWeights):
            named_tensors = self.hand_over(named_tensors)
        self._weights = named_tensors, version
        if self._transfer is None:
            self._insist("engine", "sync_weights", *self._weights)

    def stats(self) -> EngineStats:
        return self._insist("engine", "stats")

    def now(self) -> float:
        return self._insist("engine", "now")

    def sleep(self) -> None:
        if self.alive:  # not after the process has died too often
            self._insist("engine", "sleep")

    def wake(self) -> None:
        self._insist("engine", "wake")

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()
        store, self._store, self._weights = self._store, None, None
        if store is not None:
            store.close()
        self._transfer = None

    def make_worker(self, admission: Admission) -> RemoteWorker:
        return RemoteWorker(self, admission)
