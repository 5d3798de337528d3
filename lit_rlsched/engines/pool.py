"""Several engines behind the interface of one, which step together on a logical clock."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.devices import num_devices
from lit_rlsched.engines.rollout_worker import EngineWorker, Worker
from lit_rlsched.engines.spec import EngineSpec, Footprint, Sizes, Weights
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.routing import moves, promised_tokens, route
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, Request

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

WINDOW = 32
"""Turns after which engines that run ahead wait for each other while requests wait for a slot."""


class EnginePool(RolloutEngine):
    """Decodes with several equal engines, which `PoolWorker` lets step together.

    Slots and memory budget of the run are divided equally. On GPUs, engine `i` has GPU `i`; with
    `tensor_parallel_size=n`, the next `n`. On CPU, the engines share the cores equally. Engines in
    processes of their own start, load weights and sleep at the same time.

    Args:
        engines: Engines that were not started yet, all with the same settings.

    Raises:
        UsageError: there is no engine; in `start`: the slots cannot be divided equally, or there
            are fewer GPUs than engines.
    """

    engines: Sequence[RolloutEngine] = ()

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise UsageError("`EnginePool(engines=[])`: give at least one engine.")
        self.engines = tuple(engines)
        first = self.engines[0]
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
    def name(self) -> str:
        return self.engines[0].name

    @property
    def tensor_parallel_size(self) -> int:
        return self.engines[0].tensor_parallel_size

    @tensor_parallel_size.setter
    def tensor_parallel_size(self, size: int) -> None:
        for engine in self.engines:
            engine.tensor_parallel_size = size

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """What the model allows, with an equal share of the devices."""
        most = self.engines[0].max_tensor_parallel_size(spec)
        share = num_devices(spec.device.type) // len(self.engines)
        while most > max(1, share):
            most //= 2
        return most

    def cache_dtype(self, spec: EngineSpec) -> "torch.dtype":
        return self.engines[0].cache_dtype(spec)

    def most_slots(self, spec: EngineSpec) -> int:
        return len(self.engines) * self.engines[0].most_slots(spec)

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """The memory of all engines on CPU; of one engine on a GPU, where each has its own."""
        held = self.engines[0].footprint(self._spec_of(0, spec), sizes)
        times = 1 if spec.device.type == "cuda" else len(self.engines)
        each = f"{len(self.engines)} engines, each " if times > 1 else ""
        return replace(
            held,
            weights=times * held.weights,
            cache=times * held.cache,
            asleep=len(self.engines) * held.asleep,
            how_weights=each + held.how_weights,
            how_cache=each + held.how_cache,
        )

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        """Of each engine."""
        if spec.device.type != "cuda":
            footprint = replace(footprint, cache=footprint.cache // len(self.engines))
        return self.engines[0].cache_tokens(self._spec_of(0, spec), footprint, token_bytes)

    def _spec_of(self, index: int, spec: EngineSpec) -> EngineSpec:
        engines, budget = len(self.engines), spec.kv_cache_bytes
        share = None if budget is None else budget // engines
        slots = spec.slots // engines
        return replace(spec, slots=slots, kv_cache_bytes=share, index=index, engines=engines)

    def start(self, spec: EngineSpec) -> None:
        if spec.slots % len(self.engines):
            raise UsageError(
                f"`EngineSpec(slots={spec.slots})`: must be a multiple of the number of engines, "
                f"{len(self.engines)}."
            )
        specs = [self._spec_of(i, spec) for i in range(len(self.engines))]
        self.engines[0].reserve(specs[0], self.engines)
        try:
            self.each(lambda engine: engine.start(specs[self.engines.index(engine)]))
        except BaseException:
            self.close()
            raise
        self.kv_block = self.engines[0].kv_block
        capacities = [e.kv_capacity for e in self.engines if e.kv_capacity is not None]
        self.kv_capacity = min(capacities, default=None)

    def make_worker(self, admission: Admission) -> "PoolWorker":
        """Return a worker of all engines; each gets a copy of the admission."""
        workers: list[Any] = [e.make_worker(copy.deepcopy(admission)) for e in self.engines]
        return PoolWorker(workers, self.engines)

    def _no_engine(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("Several engines decode through `make_worker`, or with `each`.")

    submit = step = abort = stats = _no_engine

    def sync_weights(self, named_tensors: Weights, version: int) -> None:
        handed = self.engines[0].hand_over(named_tensors)
        self.each(lambda engine: engine.sync_weights(handed, version))

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
        threads = ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine")
        try:
            calls = [threads.submit(call, engine) for engine in self.engines]
            wait(calls)
            return [call.result() for call in calls]
        finally:  # after Ctrl-C, the threads end when the engines are closed
            threads.shutdown(wait=False, cancel_futures=True)


class PoolWorker(Worker):
    """Keeps the slots of several engines filled.

    An engine step is one step of each busy engine, and its events come in the order of the engines.
    An engine in another process may be many of them ahead. Its speed decides how long a round
    takes, and nothing else.

    A group goes to one engine (`route`). Requests that wait there may move to an engine with free
    slots (`moves`) in engine steps for which the engines wait for each other: every one in rounds
    that do not let engines run ahead, else every `WINDOW`th while requests wait. A request that has
    had a slot in this round stays with its engine, which may keep its cache and its noise.
    """

    def __init__(
        self, workers: Sequence[EngineWorker], engines: Sequence[RolloutEngine] = ()
    ) -> None:
        super().__init__(workers[0].admission, len(workers))
        self.workers = workers
        self._clocks = [engine for engine in engines if engine.virtual_clock]
        self._requests: dict[str, Request] = {}
        """All that run or wait, in the order of their submission."""
        self._group_engines: dict[str, int] = {}
        self._engine_of: dict[str, int] = {}
        """Engine of each request of this round, finished or not."""
        self._begun: set[str] = set()
        """Requests that have had a slot in this round."""
        self._ahead = False
        self._window: int | None = 0
        """Engine steps until the engines wait for each other; None: they need not in this round."""
        self._moved = 0

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {
            "rollout/engines": len(self.workers),
            "rollout/moved_requests": self._moved,
        }
        for worker in self.workers:
            for name, value in worker.metrics().items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def start_trace(self) -> RolloutTrace:
        trace = super().start_trace()
        for worker in self.workers:
            worker.start_trace()
            worker.trace = trace  # a request that leaves between two steps is reported there
        self._moved = 0
        return trace

    def start_round(self, ahead: bool, version: int = 0) -> None:
        self._ahead, self._window = ahead, 0
        self._group_engines.clear()
        self._engine_of.clear()
        self._begun.clear()
        for worker in self.workers:
            worker.start_round(ahead, version)

    def submit(self, requests: Iterable[Request]) -> None:
        requests = [*requests]
        groups: dict[str, float] = {}
        for request in requests:
            if request.group not in self._group_engines:
                promised = groups.get(request.group, 0.0)
                groups[request.group] = promised + promised_tokens(request)
        if groups:
            loads = [0.0] * len(self.workers)  # promised tokens of each engine
            for request in self._requests.values():
                loads[self._engine_of[request.id]] += promised_tokens(request)
            self._group_engines |= route(groups, loads)
        for request in requests:
            self._requests[request.id] = request
            self._engine_of.setdefault(request.id, self._group_engines[request.group])
        for engine, ids in self._by_engine(request.id for request in requests).items():
            self.workers[engine].submit(self._requests[name] for name in ids)

    def _by_engine(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Sort known requests by their engine."""
        parts: dict[int, list[str]] = {}
        for name in request_ids:
            if name in self._requests:
                parts.setdefault(self._engine_of[name], []).append(name)
        return dict(sorted(parts.items()))

    def step(self) -> list[Event]:
        if self._window == 0:
            self._meet()
        most = min(worker.begin() for worker in self.workers if worker.busy)
        most = min(most, self._window or most)
        busy = {i: worker for i, worker in enumerate(self.workers) if worker.busy}
        steps = {i: worker.advance(most) for i, worker in busy.items()}
        self.trace.take_engine_step(steps)
        if self._window:
            self._window -= max(step.decode_steps for step in steps.values())
        for step in steps.values():
            self._begun.update(step.admitted)
            for name in step.left:
                del self._requests[name]
        return [event for step in steps.values() for event in step.events]

    def _meet(self) -> None:
        """Move waiting requests, now that every engine is at the same engine step."""
        now = max((engine.now() for engine in self._clocks), default=0.0)
        for engine in self._clocks:
            engine.wait_until(now)
        waits = False
        if len(self._requests) > sum(len(worker.running) for worker in self.workers):
            for worker in self.workers if self._ahead else ():
                worker.allow(0)  # no idle engine begins what moves there by itself
            waits = self._move()
        if self._ahead:
            self._window = WINDOW if waits else None
            for worker in self.workers:
                worker.allow(self._window)
        elif waits:
            self._window = 1  # no engine skips a step in which a request could move

    def _move(self) -> bool:
        """Move waiting requests to free slots; return whether requests still wait."""
        # slots that waiting requests are known to get in the next step
        known = self.admission.refill != "rounds" and self.admission.budget is None
        running = [len(worker.running) for worker in self.workers]
        free = [self.admission.slots - n if known or not n else 0 for n in running]
        wait = [
            request
            for request in self._requests.values()
            if request.id not in self.workers[self._engine_of[request.id]].running
        ]
        first = [r for r in wait if not r.later] or wait
        waiting: list[list[Request]] = [[] for _ in free]
        for request in first:
            engine = self._engine_of[request.id]
            free[engine] -= 1
            if request.id not in self._begun:
                waiting[engine].append(request)
        moved = moves(waiting, free)
        for engine, ids in self._by_engine(moved).items():
            self.workers[engine].abort(ids)
            free[engine] += len(ids)
        self._engine_of |= moved
        for engine, ids in self._by_engine(moved).items():
            self.workers[engine].submit(self._requests[name] for name in ids)
        self._moved += len(moved)
        return min(free) < 0 or len(first) < len(wait)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        unreported: list[Event] = []
        if request_ids is None:
            for worker in self.workers:
                worker.stop()
            for worker in self.workers:
                unreported += worker.abort()
            self._requests.clear()
            return unreported
        for engine, ids in self._by_engine(request_ids).items():
            unreported += self.workers[engine].abort(ids)
            for name in ids:
                del self._requests[name]
        return unreported
