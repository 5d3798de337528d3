"""What stands between the round loop and an engine: slots are refilled, steps recorded."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Event, Request

if TYPE_CHECKING:
    from lit_rlsched.engines.base import RolloutEngine


class Worker(Protocol):
    """What the round loop drives: a `RolloutWorker`, here or in the engine's own process."""

    admission: Admission
    trace: RolloutTrace
    """What ran when, in the last or current rollout."""

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""

    def metrics(self) -> dict[str, float]:
        """What the trace does not say of the rollout, `rollout/*`."""

    def start_trace(self) -> RolloutTrace:
        """Begin a new trace; nothing may be running."""

    def start_round(self, take_turns: bool, ahead: bool) -> None:
        """Say what holds for the round that is about to be submitted.

        Args:
            take_turns: Whether requests of `least_attained` order take turns.
            ahead: Whether nothing that the caller does between two steps changes what the others
                do. A worker in a process of its own then goes on without being asked.
        """

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests wait for a slot."""

    def step(self) -> list[Event]:
        """Refill the free slots and advance the engine.

        A request that ended where it should pause has the finish reason `paused`; it is no longer
        here, and goes on when it is submitted again.
        """

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates of the tokens that waiting requests will draw, by id."""

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or everything that runs or waits.

        Returns:
            The tokens that no event has told of yet, where they are known.
        """


class RolloutWorker:
    """Keeps the engine's slots filled and records what ran when.

    Args:
        engine: A started engine.
        admission: Which waiting request takes a free slot.
    """

    def __init__(self, engine: "RolloutEngine", admission: Admission) -> None:
        self.engine = engine
        self.admission = admission
        self.trace = self._new_trace()
        self._requests: dict[str, Request] = {}
        self._drawn: dict[str, int] = {}
        self._stats = engine.stats()

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._drawn) or len(self.admission) > 0

    def metrics(self) -> dict[str, float]:
        """What the trace does not say of the round: nothing."""
        return {}

    def start_round(self, take_turns: bool, ahead: bool) -> None:
        """See `Worker`; this one never runs ahead."""
        self.admission.take_turns = take_turns

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests wait for a slot."""
        self.admission.push(requests)

    def step(self) -> list[Event]:
        """Refill the free slots and advance the engine.

        A request that ended where it should pause has the finish reason `paused`; it is no longer
        here, and goes on when it is submitted again.
        """
        step = self.advance()
        self.trace.take(step)
        return step.events

    def advance(self) -> Step:
        """The same, not yet in the trace."""
        engine, before = self.engine, self._stats
        admitted = self.admission.pop(self._drawn, before.kv_tokens)
        start = engine.now()
        if admitted:
            engine.submit(admitted)
            for request in admitted:
                self._requests[request.id], self._drawn[request.id] = request, 0
        running = len(self._drawn)
        events = engine.step()
        end = engine.now()
        self._stats = after = engine.stats()
        left, drawn = {}, self._drawn
        for i, event in enumerate(events):
            drawn[event.request_id] += len(event.token_ids)
            if event.finish_reason is not None:
                left[event.request_id] = drawn.pop(event.request_id)
                events[i] = self._ended(event, left[event.request_id])
        return Step(
            start,
            end,
            running,
            after.step_kv_tokens or after.kv_tokens,
            after.decode_steps - before.decode_steps,
            after.prefill_tokens - before.prefill_tokens,
            after.cached_tokens - before.cached_tokens,
            after.preemptions - before.preemptions,
            [request.id for request in admitted],
            events,
            left,
        )

    def _ended(self, event: Event, drawn: int) -> Event:
        request = self._requests.pop(event.request_id)
        total = len(request.prefix_ids) + drawn
        if event.finish_reason == "length" and total < request.sampling.max_completion_length:
            return replace(event, finish_reason="paused")
        return event

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates of the tokens that waiting requests will draw, by id."""
        self.admission.rekey(expected)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or everything that runs or waits.

        Returns:
            The tokens that no event has told of yet.
        """
        if request_ids is None:
            self.admission.clear()
            running = list(self._drawn)
        else:
            self.admission.discard(request_ids)
            running = [i for i in request_ids if i in self._drawn]
        untold = []
        for request_id, partial in self.engine.abort(running).items():
            told = self._drawn.pop(request_id)
            del self._requests[request_id]
            self.trace.left(request_id, self.engine.now(), len(partial.token_ids))
            if new := partial.token_ids[told:]:
                untold.append(Event(request_id, new, partial.logprobs[told:]))
        if request_ids is None:
            self._drawn.clear()
            self._requests.clear()
        self._stats = self.engine.stats()  # their cache is free
        return untold

    def start_trace(self) -> RolloutTrace:
        """Begin a new trace; nothing may be running."""
        assert not self.busy, "a trace begins between rollouts"
        self.trace = self._new_trace()
        self._stats = self.engine.stats()
        return self.trace

    def _new_trace(self) -> RolloutTrace:
        return RolloutTrace(self.admission.slots, dynamic=self.admission.budget is not None)
