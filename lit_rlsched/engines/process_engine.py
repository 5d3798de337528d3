"""Runs any engine in a child process."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.child import CLOSED, Child, PipeChild, ReplacedEngine, pickled_engine
from lit_rlsched.engines.devices import available_cores, cores_of, give_back, variables_of
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.engines.spec import EngineDied, EngineSpec, EngineStats, Footprint, Partial, Sizes
from lit_rlsched.engines.weight_transfer import WeightTransfer, check_transfer
from lit_rlsched.engines.weights import HandedWeights, WeightsFile, WeightsStore
from lit_rlsched.processes import require_posix
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, Request


class ProcessEngine(ReplacedEngine):
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

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        weight_transfer: Literal["nccl"] | None = None,
    ) -> None:
        if engine is None:
            from lit_rlsched.engines.vllm import VLLMEngine

            engine = VLLMEngine()
        if isinstance(engine, ProcessEngine):
            name = type(self).__name__
            inner = type(engine).__name__
            raise UsageError(f"`{name}(engine={inner}(...))`: one process is enough.")
        check_transfer(weight_transfer, engine, type(self).__name__)
        super().__init__()
        self.engine = engine
        self.weight_transfer = engine.weight_transfer = weight_transfer
        self.logprobs, self.enable_lora = engine.logprobs, engine.enable_lora
        self.kv_block, self.kv_capacity = engine.kv_block, engine.kv_capacity
        self._transfer: WeightTransfer | None = None
        """Shared with the other engines of the run."""
        self._store: WeightsStore | None = None
        self._weights: tuple[HandedWeights, int] | None = None
        """The weights of the last sync, and their policy version."""

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
        self._end()
        if self.weight_transfer is not None and self._transfer is None:
            self.reserve(spec, [self])
        self._spec = replace(spec, policy=None)  # it loads its own weights
        self._store = self._transfer or self._new_store()
        self._deaths = 0
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

    def _new_store(self) -> WeightsStore:
        """Make the place through which weights reach the process."""
        return WeightsFile()

    def submit(self, requests: Sequence[Request]) -> None:
        self._ask("engine", "submit", requests)

    def step(self) -> list[Event]:
        events = self._ask("engine", "step")
        self._deaths = 0
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
        self._end()
        self._transfer = None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()
        store, self._store, self._weights = self._store, None, None
        if store is not None:
            store.close()

    def make_worker(self, admission: Admission) -> RemoteWorker:
        return RemoteWorker(self, admission)
