"""Several engines of one node behind the interface of one."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.devices import num_devices
from lit_rlsched.engines.pool_worker import PoolWorker
from lit_rlsched.engines.spec import EngineSpec, Footprint, Sizes, Weights
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.settings import UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class EnginePool(RolloutEngine):
    """Decodes with several equal engines, which `PoolWorker` lets take turns.

    Slots and memory budget of the run are divided equally. On GPUs, engine `i` has GPU `i`; with
    `tensor_parallel_size=n`, the next `n`. On CPU, the engines share the cores equally. Engines in
    processes of their own start, load weights and sleep at the same time.

    Args:
        engines: Engines that were not started yet, all with the same settings.

    Raises:
        UsageError: there is no engine; in `start`: the slots cannot be divided equally, or there
            are fewer GPUs than engines.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise UsageError("`EnginePool(engines=[])`: give at least one engine.")
        self._engines = tuple(engines)
        first = self._engines[0]
        self.kv_block, self.kv_capacity = first.kv_block, first.kv_capacity
        self.logprobs = all(engine.logprobs for engine in engines)
        self.enable_lora, self.weight_transfer = first.enable_lora, first.weight_transfer
        self.decodes_by_itself = all(engine.decodes_by_itself for engine in engines)

    @classmethod
    def of(cls, engine: RolloutEngine, num_engines: int) -> "EnginePool":
        """Make a pool of engines like this one, each in a process of its own."""
        from lit_rlsched.engines.process_engine import ProcessEngine

        if isinstance(engine, EnginePool):
            raise UsageError(
                f"`{num_engines=}` with `engine=EnginePool(...)`, which has "
                f"{len(engine.engines)} engines already. Leave one of the two out."
            )
        if not isinstance(engine, ProcessEngine):
            engine = ProcessEngine(engine)
        return cls([engine, *(copy.deepcopy(engine) for _ in range(num_engines - 1))])

    @property
    def engines(self) -> Sequence[RolloutEngine]:
        return self._engines

    @property
    def name(self) -> str:
        return self._engines[0].name

    @property
    def tensor_parallel_size(self) -> int:
        return self._engines[0].tensor_parallel_size

    @tensor_parallel_size.setter
    def tensor_parallel_size(self, size: int) -> None:
        for engine in self._engines:
            engine.tensor_parallel_size = size

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """What the model allows, with an equal share of the devices."""
        most = self._engines[0].max_tensor_parallel_size(spec)
        share = num_devices(spec.device.type) // len(self._engines)
        while most > max(1, share):
            most //= 2
        return most

    def cache_dtype(self, spec: EngineSpec) -> "torch.dtype":
        return self._engines[0].cache_dtype(spec)

    def most_slots(self, spec: EngineSpec) -> int:
        return len(self._engines) * self._engines[0].most_slots(spec)

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """The memory of all engines on CPU; of one engine on a GPU, where each has its own."""
        held, times = self._engines[0].footprint(self._spec_of(0, spec), sizes), self._times(spec)
        each = f"{len(self._engines)} engines, each " if times > 1 else ""
        return replace(
            held,
            weights=times * held.weights,
            cache=times * held.cache,
            asleep=len(self._engines) * held.asleep,
            how_weights=each + held.how_weights,
            how_cache=each + held.how_cache,
        )

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        """Of each engine."""
        footprint = replace(footprint, cache=footprint.cache // self._times(spec))
        return self._engines[0].cache_tokens(self._spec_of(0, spec), footprint, token_bytes)

    def _times(self, spec: EngineSpec) -> int:
        """Number of engines that share the memory of a device."""
        return 1 if spec.device.type == "cuda" else len(self._engines)

    def _spec_of(self, index: int, spec: EngineSpec) -> EngineSpec:
        engines, budget = len(self._engines), spec.kv_cache_bytes
        return replace(
            spec,
            slots=spec.slots // engines,
            kv_cache_bytes=None if budget is None else budget // engines,
            index=index,
            engines=engines,
        )

    def start(self, spec: EngineSpec) -> None:
        if spec.slots % len(self._engines):
            raise UsageError(
                f"`EngineSpec(slots={spec.slots})`: must be a multiple of the number of engines, "
                f"{len(self._engines)}."
            )
        specs = [self._spec_of(i, spec) for i in range(len(self._engines))]
        self._engines[0].reserve(specs[0], self._engines)
        try:
            self.each(lambda engine: engine.start(specs[self._engines.index(engine)]))
        except BaseException:
            self.close()
            raise
        self.kv_block = self._engines[0].kv_block
        capacities = [e.kv_capacity for e in self._engines if e.kv_capacity is not None]
        self.kv_capacity = min(capacities, default=None)

    def make_worker(self, admission: Admission) -> PoolWorker:
        """Return a worker of all engines; each gets a copy of the admission."""
        workers: list[Any] = [e.make_worker(copy.deepcopy(admission)) for e in self._engines]
        return PoolWorker(workers, self._engines)

    def _no_engine(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("Several engines decode through `make_worker`, or with `each`.")

    submit = step = abort = stats = _no_engine

    def sync_weights(self, named_tensors: Weights, version: int) -> None:
        handed = self._engines[0].hand_over(named_tensors)
        self.each(lambda engine: engine.sync_weights(handed, version))

    def policy_changes(self) -> None:
        self.each(lambda engine: engine.policy_changes())

    def sleep(self) -> None:
        self.each(lambda engine: engine.sleep())

    def wake(self) -> None:
        self.each(lambda engine: engine.wake())

    def close(self) -> None:
        self.each(lambda engine: engine.close())

    def each(self, call: Callable[[RolloutEngine], T]) -> list[T]:
        """Call a function with each engine, at the same time if they are in other processes.

        Raises:
            Exception: the first error, once all calls have ended.
        """
        if not self.decodes_by_itself:
            return super().each(call)
        threads = ThreadPoolExecutor(len(self._engines), thread_name_prefix="engine")
        try:
            calls = [threads.submit(call, engine) for engine in self._engines]
            wait(calls)
            return [call.result() for call in calls]
        finally:  # after Ctrl-C, the threads end when the engines are closed
            threads.shutdown(wait=False, cancel_futures=True)
