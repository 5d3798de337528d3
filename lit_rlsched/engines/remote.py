"""A worker in the engine's own process, as the controller sees it."""

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_rlsched.engines.base import EngineDied
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Event, Request

if TYPE_CHECKING:
    from lit_rlsched.engines.child import Child
    from lit_rlsched.engines.process_engine import ProcessEngine


class RemoteWorker:
    """Has the methods of `RolloutWorker`, which sits next to the engine behind a pipe.

    Where the round allows, that one runs ahead: it has often made its next steps when it is asked
    for one. They are told in order, so that a round ends in the same step, with the same tokens,
    however far it was ahead; what it drew beyond is dropped, and counted in `ahead_steps`.

    Everything that runs or waits is known here with the tokens that were told: when the process
    dies, another one goes on from those.

    Args:
        engine: Started.
        admission: Which waiting request takes a free slot.
    """

    def __init__(self, engine: "ProcessEngine", admission: Admission) -> None:
        self.engine = engine
        self.admission = admission
        """As it was at the start: the one that works is in the other process."""
        self.ahead_steps = 0
        """Decode steps of the round that were made and not asked for."""
        self.trace = self._new_trace()
        self._told: dict[str, Event] = {}
        """Tokens of each since it was submitted."""
        self._requests: dict[str, Request] = {}
        self._running: set[str] = set()
        self._take_turns = self._ahead = False
        self._going = False
        """Whether it was told to run ahead."""
        self._now = 0.0
        self._known: Child | None = None
        """The process that was told of this worker."""
        self._set_up()

    def metrics(self) -> dict[str, float]:
        """How often the process was replaced, and what it decoded beyond the round's end."""
        return {
            "rollout/engine_restarts": self.engine.restarts,
            "rollout/ahead_steps": self.ahead_steps,
        }

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._requests)

    def start_round(self, take_turns: bool, ahead: bool) -> None:
        """See `Worker`."""
        self._take_turns, self._ahead = take_turns, ahead
        self._tell("start_round", take_turns, ahead)

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests wait for a slot."""
        new = list(requests)
        for request in new:
            self._requests[request.id] = request
            self._told[request.id] = Event(request.id, [], [])
        self._tell("submit", new)

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates of the tokens that waiting requests will draw, by id."""
        for request_id in expected.keys() & self._requests.keys():
            request = self._requests[request_id]
            self._requests[request_id] = replace(request, expected=expected[request_id])
        self._tell("rekey", dict(expected))

    def step(self) -> list[Event]:
        """The next step of the other process."""
        while True:
            try:
                step = self._next_step()
                break
            except EngineDied:
                self._revive()
        self.engine.went_on()
        self._now = step.end
        # it may have gone on with what was aborted here meanwhile
        step = replace(
            step,
            admitted=[name for name in step.admitted if name in self._requests],
            events=[event for event in step.events if event.request_id in self._requests],
            left={name: tokens for name, tokens in step.left.items() if name in self._requests},
        )
        self._running.update(step.admitted)
        self.trace.take(step)
        for event in step.events:
            if event.finish_reason is None:
                told = self._told[event.request_id]
                told.token_ids.extend(event.token_ids)
            else:
                self._forget(event.request_id)
        return step.events

    def _next_step(self) -> Step:
        child = self.engine.child
        step: Step
        if not self._ahead:
            step = child.call("worker", "advance")
            return step
        if not self._going:
            child.ask("ahead")
            self._going = True
        step = child.answer()
        return step

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or everything that runs or waits.

        Returns:
            The tokens that no event has told of yet, unless it ran ahead.
        """
        asked = list(self._requests) if request_ids is None else request_ids
        ids = [name for name in asked if name in self._requests]
        untold: list[Event] = []
        if not self._going and ids and self.engine.alive:
            try:
                every = request_ids is None
                untold = self.engine.child.call("worker", "abort", None if every else ids)
            except EngineDied:
                for name in ids:
                    self._leave(name)
                self._revive()
                return []
        more = {event.request_id: len(event.token_ids) for event in untold}
        for name in ids:
            self._leave(name, more.get(name, 0))
        if self._going and self.engine.alive:
            if request_ids is None:
                self._halt()
            else:
                self._tell("abort", ids)
        return untold

    def _leave(self, request_id: str, untold: int = 0) -> None:
        if request_id in self._running:
            tokens = len(self._told[request_id].token_ids) + untold
            self.trace.left(request_id, self._now, tokens)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id], self._told[request_id]
        self._running.discard(request_id)

    def _halt(self) -> None:
        """Stop what ran ahead, and drop what it has drawn."""
        self._going = False
        try:
            self.engine.child.call("halt", skipped=self._count_ahead)
        except EngineDied:
            self._revive()

    def _count_ahead(self, answer: object) -> None:
        if isinstance(answer, Step):
            self.ahead_steps += answer.decode_steps

    def start_trace(self) -> RolloutTrace:
        """Begin a new trace; nothing may be running."""
        assert not self.busy, "a trace begins between rollouts"
        self.trace, self.ahead_steps = self._new_trace(), 0
        if self.engine.child is not self._known:  # the process died between rounds
            self._set_up()
        self._tell("start_trace")
        return self.trace

    def _new_trace(self) -> RolloutTrace:
        return RolloutTrace(self.admission.slots, dynamic=self.admission.budget is not None)

    def _tell(self, method: str, *arguments: object) -> None:
        """Tell the worker there; a new one knows it from the start."""
        try:
            self.engine.child.tell("worker", method, *arguments)
        except EngineDied:
            self._revive()

    def _revive(self) -> None:
        """Start the process anew and submit what it had, from the tokens told."""
        self._going = False
        for name in self._running:
            self.trace.left(name, self._now, len(self._told[name].token_ids))
        self._running.clear()
        names = sorted(self._requests, key=lambda name: not self._told[name].token_ids)
        self._requests = {name: self._resumed(name) for name in names}  # what has begun first
        self._told = {name: Event(name, [], []) for name in names}
        self.engine.revive()
        self._set_up()

    def _set_up(self) -> None:
        """Tell a new process all that is known here."""
        while True:
            child = self.engine.child
            try:
                child.prefill = self._most_prefill
                child.call("admission", self.admission)
                child.tell("worker", "start_round", self._take_turns, self._ahead)
                child.tell("worker", "submit", list(self._requests.values()))
                self._known = child
                return
            except EngineDied:
                self.engine.revive()

    def _most_prefill(self) -> int:
        """Tokens of the longest that wait, as many as there are slots."""
        waiting = (r for name, r in self._requests.items() if name not in self._running)
        tokens = (len(request.prompt_ids) + len(request.prefix_ids) for request in waiting)
        return sum(heapq.nlargest(self.admission.slots, tokens))

    def _resumed(self, request_id: str) -> Request:
        request, told = self._requests[request_id], self._told[request_id].token_ids
        expected = request.expected
        if expected is not None:
            expected = max(1.0, expected - len(told))
        return replace(request, prefix_ids=(*request.prefix_ids, *told), expected=expected)
