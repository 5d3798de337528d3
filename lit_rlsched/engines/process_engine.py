"""Any engine in a process of its own."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from lit_rlsched.engines.base import (
    EngineDied,
    EngineSpec,
    EngineStats,
    Footprint,
    Partial,
    RolloutEngine,
    Sizes,
    give_back,
)
from lit_rlsched.engines.child import Child
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.engines.shared_weights import SharedWeights, WeightsFile
from lit_rlsched.platforms import require_posix
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.hangs import AnswerTimeouts
from lit_rlsched.types import Event, Request

MAX_DEATHS = 3
"""Times in a row that the process may die before the run is stopped."""


class ProcessEngine(RolloutEngine):
    """Runs another engine in a child process, so that it decodes while the trainer computes.

    There, the engine refills its slots and goes on by itself as long as nothing that the trainer
    decides between two steps could change what is drawn; `StreamedTraining` needs that. Weights are
    handed over through memory that both processes share, a second copy of them on the host.

    A process that dies, by the kernel's hand or its own, or loses a worker process of vLLM, is
    started anew under the same weights, and what it was decoding goes on from the tokens that the
    trainer has received: from there on it is drawn with other noise, unless the noise of the engine
    has no state (`TransformersEngine`). One that hangs is killed and replaced in the same way: it
    may take 20 times as long for a step as 99 % of the run's steps have taken, and 120 s at least;
    10 minutes for the first, 30 for its start (`AnswerTimeouts`). `rollout/engine_restarts` counts
    it. One that dies three times without a step in between stops the run.

    Args:
        engine: The engine; `VLLMEngine()` by default.

    Raises:
        RuntimeError: in `start`, what the engine raised there.

    Example::

        RolloutDataModule(..., engine=ProcessEngine(VLLMEngine(gpu_memory_utilization=0.5)))
    """

    decodes_by_itself = True

    def __init__(self, engine: RolloutEngine | None = None) -> None:
        if engine is None:
            from lit_rlsched.engines.vllm import VLLMEngine

            engine = VLLMEngine()
        if isinstance(engine, ProcessEngine):
            raise ValueError("`ProcessEngine(engine=ProcessEngine(...))`: one process is enough.")
        self.engine = engine
        self.restarts = 0
        """Times the process died and was started anew."""
        self.logprobs = engine.logprobs
        self.kv_block, self.kv_capacity = engine.kv_block, engine.kv_capacity
        self._child: Child | None = None
        self._spec: EngineSpec | None = None
        self._file: WeightsFile | None = None
        self._weights: tuple[SharedWeights, int] | None = None
        """That were synced last, and their policy version."""
        self._deaths = 0
        self._timeouts = AnswerTimeouts()

    @property
    def pid(self) -> int | None:
        """Of the child, where it runs."""
        return None if self._child is None else self._child.process.pid

    @property
    def tensor_parallel_size(self) -> int:
        """The engine's."""
        return self.engine.tensor_parallel_size

    @tensor_parallel_size.setter
    def tensor_parallel_size(self, size: int) -> None:
        self.engine.tensor_parallel_size = size

    def most_slots(self, spec: EngineSpec) -> int:
        """The engine's."""
        return self.engine.most_slots(spec)

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """The engine's."""
        return self.engine.max_tensor_parallel_size(spec)

    def cache_dtype(self, spec: EngineSpec) -> torch.dtype:
        """The engine's."""
        return self.engine.cache_dtype(spec)

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """The engine's, and weights on their way to it."""
        apart = self.engine.footprint(spec, replace(sizes, apart=True))
        dtype = self.cache_dtype(replace(spec, policy=None))
        return replace(apart, handed_over=sizes.parameters * dtype.itemsize)

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        """The engine's."""
        return self.engine.cache_tokens(spec, footprint, token_bytes)

    def start(self, spec: EngineSpec) -> None:
        """Start the process, and the engine in it."""
        require_posix("`ProcessEngine`")
        self.close()
        self._spec = replace(spec, policy=None)  # it loads weights of its own
        self._file = WeightsFile()
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
        give_back(self._spec.device)  # where it is replaced, the trainer has computed meanwhile
        self._timeouts.starts()
        self._child = Child(self.engine, self._timeouts)
        self.kv_block, self.kv_capacity = self._child.call("start", self._spec)
        if self._weights is not None:
            self._child.call("engine", "sync_weights", *self._weights)

    def submit(self, requests: Sequence[Request]) -> None:
        self._ask("engine", "submit", requests)

    def step(self) -> list[Event]:
        events: list[Event] = self._ask("engine", "step")
        self._deaths = 0
        return events

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        try:
            aborted: dict[str, Partial] = self._ask("engine", "abort", list(request_ids))
        except EngineDied:
            return {}
        return aborted

    def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._refuse_when_closed()
        assert self._file is not None
        assert self._spec is not None
        dtype = self.engine.cache_dtype(self._spec)
        self._weights = self._file.write(named_tensors, dtype), version
        self._insist("engine", "sync_weights", *self._weights)

    def stats(self) -> EngineStats:
        stats: EngineStats = self._insist("engine", "stats")
        return stats

    def now(self) -> float:
        return float(self._insist("engine", "now"))

    def sleep(self) -> None:
        if self.alive:  # else it was given up
            self._insist("engine", "sleep")

    def wake(self) -> None:
        self._insist("engine", "wake")

    def close(self) -> None:
        """End the process; it is killed if it does not end by itself."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
        file, self._file, self._weights = self._file, None, None
        if file is not None:
            file.close()

    def make_worker(self, admission: Admission) -> RemoteWorker:
        """The worker is in the engine's process; this stands for it here."""
        return RemoteWorker(self, admission)

    @property
    def alive(self) -> bool:
        """Whether there is a process: it was started, not closed and not given up."""
        return self._child is not None

    @property
    def child(self) -> "Child":
        """The process that runs."""
        self._refuse_when_closed()
        assert self._child is not None
        return self._child

    def revive(self) -> None:
        """Start the process anew, under the weights it had.

        Raises:
            RuntimeError: it died too often.
        """
        error: Exception | None = None
        while True:
            how = self.child.kill()
            if error is not None:
                how = f"did not start again ({error})"
            self._deaths += 1
            if self._deaths >= MAX_DEATHS:
                self.close()
                raise RuntimeError(
                    f"The engine's process {how}, {self._deaths} times in a row. If it was killed "
                    "from outside, memory may have run out: give the key-value cache less."
                ) from error
            self.restarts += 1
            warnings.warn(
                f"The engine's process {how}; another one takes its place and goes on from the "
                f"tokens received (restart {self.restarts}).",
                stacklevel=2,
            )
            try:
                return self._launch()
            except EngineDied:
                error = None
            except Exception as refusal:  # it has started like this before
                error = refusal

    def went_on(self) -> None:
        """It has made a step since it was started."""
        self._deaths = 0

    def _ask(self, *message: Any) -> Any:
        """The answer of the child; where it dies, another one is started, which knows nothing."""
        try:
            return self.child.call(*message)
        except EngineDied:
            self.revive()
            raise

    def _insist(self, *message: Any) -> Any:
        """The same of what can be asked of another one."""
        while True:
            with suppress(EngineDied):
                answer = self._ask(*message)
                self._deaths = 0
                return answer

    def _refuse_when_closed(self) -> None:
        if self._child is None:
            raise RuntimeError("The engine is closed or was not started.")
