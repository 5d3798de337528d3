"""The worker between the round loop and an engine: refills free slots and records each step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from lit_rlsched.engines.spec import EngineStats, Partial
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Event, Request


class Worker(ABC):
    """Keeps the slots of one engine or several filled, in this process or in the engine's.

    Args:
        admission: Decides which waiting request takes a free slot of an engine.
        engines: Number of engines.
    """

    def __init__(self, admission: Admission, engines: int = 1) -> None:
        self.admission = admission
        self.slots = engines * admission.slots
        """Maximum number of requests that decode at once."""
        self._engines = engines
        self.trace = self._new_trace()
        """What ran when, in the last or current rollout."""

    def _new_trace(self) -> RolloutTrace:
        dynamic = self.admission.budget is not None
        return RolloutTrace(self.slots, dynamic=dynamic, engines=self._engines)

    def start_trace(self) -> RolloutTrace:
        """Begin a new trace; nothing may be running."""
        assert not self.busy, "a trace begins between rollouts"
        self.trace = self._new_trace()
        return self.trace

    def may_wait(self, requests: int) -> bool:
        """Return whether some of this number of requests may have to wait for a slot."""
        return requests > self.slots or self.admission.budget is not None

    def metrics(self) -> dict[str, float]:
        """`rollout/*` metrics of the rollout that do not follow from the trace."""
        return {}

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether any request runs or waits."""

    @abstractmethod
    def start_round(self, ahead: bool, version: int = 0) -> None:
        """Set what holds for the round whose requests are submitted next.

        Args:
            ahead: Whether a worker in the engine's process may keep stepping without being asked,
                because the caller changes nothing of other requests between two steps.
            version: Policy version of the engine's weights.
        """

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests for a slot."""

    @abstractmethod
    def step(self) -> list[Event]:
        """Refill the free slots and step the engine.

        A request that reached its `pause_at` has the finish reason `paused`. The worker forgets it;
        it resumes when it is submitted again.
        """

    @abstractmethod
    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or all that run or wait.

        Returns:
            The known tokens that no event has reported yet.
        """


class EngineWorker(Worker):
    """Worker of a single engine, alone or as one of several in a `PoolWorker`."""

    @property
    @abstractmethod
    def running(self) -> Collection[str]:
        """Ids of the requests that have a slot."""

    @property
    def free(self) -> int:
        """Slots that waiting requests are known to get in the next step."""
        running, admission = len(self.running), self.admission
        if running and (admission.refill == "rounds" or admission.budget is not None):
            return 0
        return admission.slots - running

    @abstractmethod
    def begin(self) -> int:
        """Do the part of the next step that need not wait for the engine.

        Returns:
            Maximum number of decode steps that it may make; 1 if the engine cannot skip any.
        """

    @abstractmethod
    def advance(self, most: int | None = None) -> Step:
        """Like `step`, without recording it in the trace.

        Args:
            most: Maximum number of decode steps of an engine that can skip some.
        """

    def allow(self, steps: int | None) -> None:
        """Let a worker that runs ahead make so many steps before the next call; None: any number.

        Unused steps of an engine without requests are lost.
        """

    def stop(self) -> None:
        """Tell a worker that runs ahead to stop, without waiting for it; `abort` follows."""

    def step(self) -> list[Event]:
        step = self.advance()
        self.trace.take(step)
        return step.events


class Decoder(Protocol):
    """The methods of an engine that a worker calls; `RolloutEngine` documents them."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Event]: ...

    def steps_to_event(self) -> int: ...

    def jump(self, steps: int) -> list[Event]: ...

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]: ...

    def stats(self) -> EngineStats: ...

    def now(self) -> float: ...


class RolloutWorker(EngineWorker):
    """Worker of an engine in the same process.

    Args:
        engine: A started engine.
        admission: Decides which waiting request takes a free slot.
    """

    def __init__(self, engine: Decoder, admission: Admission) -> None:
        super().__init__(admission)
        self.engine = engine
        self._requests: dict[str, Request] = {}
        self._drawn: dict[str, int] = {}
        self._stats = engine.stats()
        self._begun: tuple[float, list[str]] | None = None
        """Start of the next step, and the requests that were admitted for it."""
        self._version = 0

    @property
    def busy(self) -> bool:
        return bool(self._drawn) or len(self.admission) > 0

    @property
    def running(self) -> Collection[str]:
        return self._drawn.keys()

    def start_trace(self) -> RolloutTrace:
        trace = super().start_trace()
        self._stats = self.engine.stats()
        return trace

    def start_round(self, ahead: bool, version: int = 0) -> None:
        self._version = version

    def submit(self, requests: Iterable[Request]) -> None:
        self.admission.push(requests)

    def begin(self) -> int:
        self._refill()
        return self.engine.steps_to_event()

    def _refill(self) -> tuple[float, list[str]]:
        if self._begun is None:
            admitted = self.admission.pop(self._drawn, self._stats.kv_tokens)
            start = self.engine.now()
            if admitted:
                self.engine.submit(admitted)
                for request in admitted:
                    self._requests[request.id], self._drawn[request.id] = request, 0
            self._begun = start, [request.id for request in admitted]
        return self._begun

    def advance(self, most: int | None = None) -> Step:
        engine, before = self.engine, self._stats
        start, admitted = self._refill()
        self._begun = None
        running = len(self._drawn)
        events = engine.step() if most is None else engine.jump(most)
        end = engine.now()
        self._stats = after = engine.stats()
        left, drawn, version = {}, self._drawn, self._version
        for event in events:  # hot loop: one pass per drawn token
            event.version = version
            drawn[event.request_id] += len(event.token_ids)
            if event.finish_reason is not None:
                self._end(event)
                name = event.request_id
                left[name] = drawn.pop(name)
        return Step(
            start,
            end,
            running,
            after.step_kv_tokens or after.kv_tokens,
            after.decode_steps - before.decode_steps,
            after.prefill_tokens - before.prefill_tokens,
            after.cached_tokens - before.cached_tokens,
            after.preemptions - before.preemptions,
            admitted,
            events,
            left,
        )

    def _end(self, event: Event) -> None:
        request = self._requests.pop(event.request_id)
        total = len(request.prefix_ids) + self._drawn[event.request_id]
        if event.finish_reason == "length" and total < request.sampling.max_completion_length:
            event.finish_reason = "paused"

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        if request_ids is None:
            self.admission.clear()
            running = list(self._drawn)
        else:
            self.admission.discard(request_ids)
            running = [i for i in request_ids if i in self._drawn]
        if self._begun is not None:
            start, admitted = self._begun
            rest = [name for name in admitted if name not in running]
            self._begun = None if request_ids is None else (start, rest)
        unreported: list[Event] = []
        partials = self.engine.abort(running)
        for name in running:
            reported, partial = self._drawn.pop(name), partials[name]
            del self._requests[name]
            if new := partial.token_ids[reported:]:
                event = Event(name, new, partial.logprobs[reported:])
                event.version = self._version
                unreported.append(event)
            self.trace.left(name, self.engine.now(), len(partial.token_ids))
        self._stats = self.engine.stats()  # aborted requests have freed their cache
        return unreported
