"""One engine and the admission in front of it."""

from collections.abc import Iterable

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Event, Request
from lit_rlsched.scheduling.admission import Admission


class RolloutWorker:
    """Keeps the engine's slots filled and records what ran when.

    Args:
        engine: A started engine.
        admission: Which waiting request takes a free slot.
    """

    def __init__(self, engine: RolloutEngine, admission: Admission) -> None:
        self.engine = engine
        self.admission = admission
        self.trace = RolloutTrace(admission.slots)
        self._drawn: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._drawn) or len(self.admission) > 0

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests wait for a slot."""
        self.admission.push(requests)

    def step(self) -> list[Event]:
        """Refill the free slots and advance the engine."""
        admitted = self.admission.pop(len(self._drawn))
        start = self.engine.now()
        if admitted:
            self.engine.submit(admitted)
            for request in admitted:
                self._drawn[request.id] = 0
                self.trace.admitted(request.id, start)
        running, before = len(self._drawn), self.engine.stats().decode_steps
        events = self.engine.step()
        end = self.engine.now()
        stats = self.engine.stats()
        self.trace.stepped(start, end, running, stats.kv_tokens, stats.decode_steps - before)
        for event in events:
            self._drawn[event.request_id] += len(event.token_ids)
            if event.finish_reason is not None:
                self.trace.left(event.request_id, end, self._drawn.pop(event.request_id))
        return events

    def abort(self) -> None:
        """Drop everything that runs or waits."""
        self.admission.clear()
        self.engine.abort(list(self._drawn))
        for request_id, tokens in self._drawn.items():
            self.trace.left(request_id, self.engine.now(), tokens)
        self._drawn.clear()

    def start_trace(self) -> RolloutTrace:
        """Begin a new trace; nothing may be running."""
        assert not self.busy, "a trace begins between rollouts"
        self.trace = RolloutTrace(self.admission.slots)
        return self.trace
