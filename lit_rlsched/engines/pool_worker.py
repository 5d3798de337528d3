"""The worker of several engines, which take turns on a logical clock."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_rlsched.engines.rollout_worker import EngineWorker, Worker
from lit_rlsched.scheduling.routing import moves, promised_tokens, route
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Event, Request

if TYPE_CHECKING:
    from lit_rlsched.engines.base import RolloutEngine

WINDOW = 32
"""Turns after which engines that run ahead wait for each other while requests wait for a slot."""


class PoolWorker(Worker):
    """Keeps the slots of several engines filled.

    The engines take turns: a turn is one step of each busy engine, and its events come in the order
    of the engines. An engine in another process may be many turns ahead. Its speed decides how long
    a round takes, and nothing else.

    A group goes to one engine (`route`). Requests that wait there may move to an engine with free
    slots (`moves`) in turns for which the engines wait for each other: every turn in rounds that do
    not let engines run ahead, else every `WINDOW` turns while requests wait. A request that has had
    a slot in this round stays with its engine, which may keep its cache and its noise.

    Args:
        workers: A worker for each engine, all with the same admission.
        engines: The engines, for their clocks.
    """

    def __init__(
        self, workers: Sequence[EngineWorker], engines: Sequence["RolloutEngine"] = ()
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
        """Turns until the engines wait for each other; None: they need not in this round."""
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

    def start_round(self, take_turns: bool, ahead: bool, version: int = 0) -> None:
        self._ahead, self._window = ahead, 0
        self._group_engines.clear()
        self._engine_of.clear()
        self._begun.clear()
        for worker in self.workers:
            worker.start_round(take_turns, ahead, version)

    def submit(self, requests: Iterable[Request]) -> None:
        requests = [*requests]
        groups: dict[str, float] = {}
        for request in requests:
            if request.group not in self._group_engines:
                promised = groups.get(request.group, 0.0)
                groups[request.group] = promised + promised_tokens(request)
        if groups:
            self._group_engines |= route(groups, self._loads())
        for request in requests:
            self._requests[request.id] = request
            self._engine_of.setdefault(request.id, self._group_engines[request.group])
        for engine, ids in self._by_engine(request.id for request in requests).items():
            self.workers[engine].submit(self._requests[name] for name in ids)

    def _loads(self) -> list[float]:
        """Promised tokens of each engine."""
        loads = [0.0] * len(self.workers)
        for request in self._requests.values():
            loads[self._engine_of[request.id]] += promised_tokens(request)
        return loads

    def _by_engine(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Sort known requests by their engine."""
        parts: dict[int, list[str]] = {}
        for name in request_ids:
            if name in self._requests:
                parts.setdefault(self._engine_of[name], []).append(name)
        return dict(sorted(parts.items()))

    def rekey(self, expected: Mapping[str, float]) -> None:
        for engine, ids in self._by_engine(expected).items():
            for name in ids:
                self._requests[name] = replace(self._requests[name], expected=expected[name])
            self.workers[engine].rekey({name: expected[name] for name in ids})

    def step(self) -> list[Event]:
        if self._window == 0:
            self._meet()
        most = min(worker.begin() for worker in self.workers if worker.busy)
        most = min(most, self._window or most)
        busy = {i: worker for i, worker in enumerate(self.workers) if worker.busy}
        steps = {i: worker.advance(most) for i, worker in busy.items()}
        self.trace.take_turn(steps)
        if self._window:
            self._window -= max(step.decode_steps for step in steps.values())
        for step in steps.values():
            self._begun.update(step.admitted)
            for name in step.left:
                del self._requests[name]
        return [event for step in steps.values() for event in step.events]

    def _meet(self) -> None:
        """Move waiting requests, now that every engine is at the same turn."""
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
            self._window = 1  # no engine skips a turn in which a request could move

    def _move(self) -> bool:
        """Move waiting requests to free slots; return whether requests still wait."""
        free = [worker.free for worker in self.workers]
        wait = [r for r in self._requests.values() if not self._runs(r.id)]
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

    def _runs(self, request_id: str) -> bool:
        return request_id in self.workers[self._engine_of[request_id]].running

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
