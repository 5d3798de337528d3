"""The trainer's side of a worker that runs in the engine's process."""

import heapq
from array import array
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from lit_rlsched.engines.child import Child, HasChild
from lit_rlsched.engines.rollout_worker import EngineWorker
from lit_rlsched.engines.spec import EngineDied
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Event, Request, no_ids

LEAD = 1024
"""Maximum number of steps that wait to be reported; a step of 256 requests takes about 15 kB."""


class RemoteWorker(EngineWorker):
    """Drives a `RolloutWorker` in the engine's process.

    Where the round allows it, that worker runs ahead: it makes up to `LEAD` steps before it is
    asked for them. This class reports them in order, so a round ends in the same step with the same
    tokens, however far the worker was ahead. Steps beyond the end are dropped and counted in
    `ahead_steps`.

    This class knows every request that runs or waits, with the tokens reported so far: when the
    process dies, the next process continues from them.

    Args:
        engine: A started engine.
        admission: Decides which waiting request takes a free slot. It stays in its initial state:
            a copy in the engine's process does the work.
    """

    def __init__(self, engine: HasChild, admission: Admission) -> None:
        super().__init__(admission)
        self.engine = engine
        self.ahead_steps = 0
        """Decode steps of this round that were made but not asked for."""
        self._requests: dict[str, Request] = {}
        self._reported: dict[str, array[int]] = {}
        """Tokens of each request since it was submitted."""
        self._running: set[str] = set()
        self._take_turns = self._ahead = False
        self._going = False
        """Whether the worker was told to run ahead."""
        self._halting = False
        """Whether it was told to stop, and has not answered yet."""
        self._pending = False
        """Whether it was asked for a step that was not taken yet."""
        self._taken = self._granted = 0
        """Steps taken since it runs ahead, and steps that it may make."""
        self._limit: int | None = None
        """Number of steps beyond which none may be granted."""
        self._version = 0
        self._now = 0.0
        self._known: Child | None = None
        """The process that was told of this worker."""
        self._set_up()

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/engine_restarts": self.engine.restarts,
            "rollout/ahead_steps": self.ahead_steps,
        }

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> Collection[str]:
        return self._running

    def start_trace(self) -> RolloutTrace:
        trace = super().start_trace()
        self.ahead_steps = 0
        if self.engine.child is not self._known:  # the process died between rounds
            self._set_up()
        self._tell("start_trace")
        return trace

    def start_round(self, take_turns: bool, ahead: bool, version: int = 0) -> None:
        self._take_turns, self._ahead, self._limit = take_turns, ahead, None
        self._version = version
        self._tell("start_round", take_turns, ahead, version)

    def submit(self, requests: Iterable[Request]) -> None:
        new = list(requests)
        for request in new:
            self._requests[request.id] = request
            self._reported[request.id] = no_ids()
        self._tell("submit", new)

    def rekey(self, expected: Mapping[str, float]) -> None:
        for request_id in expected.keys() & self._requests.keys():
            request = self._requests[request_id]
            self._requests[request_id] = replace(request, expected=expected[request_id])
        self._tell("rekey", dict(expected))

    def begin(self) -> int:
        """Ask for the next step, so that it runs beside those of other engines."""
        with suppress(EngineDied):  # `advance` finds out too
            self._ask()
        return 1

    def advance(self, most: int | None = None) -> Step:
        while True:
            try:
                self._ask()
                step: Step = self.engine.child.answer()
                break
            except EngineDied:
                self._revive()
        self._pending = False
        self._taken += 1
        self.engine.stepped()
        self._now = step.end
        # a worker that ran ahead may have continued requests that were aborted here meanwhile
        step = replace(
            step,
            admitted=[name for name in step.admitted if name in self._requests],
            events=[event for event in step.events if event.request_id in self._requests],
            left={name: tokens for name, tokens in step.left.items() if name in self._requests},
        )
        self._running.update(step.admitted)
        step = replace(step, running=len(self._running))
        for event in step.events:
            if event.finish_reason is None:
                self._reported[event.request_id].extend(event.token_ids)
            else:
                self._forget(event.request_id)
        return step

    def _ask(self) -> None:
        """Make sure that a step will come, and keep a worker that runs ahead going."""
        child = self.engine.child
        if not self._ahead:
            if not self._pending:
                child.ask("advance")
                self._pending = True
            return
        if not self._going:
            self._taken = self._granted = 0
        most = self._taken + LEAD
        if self._limit is not None:
            most = min(most, self._limit)
        more = most - self._granted
        if not self._going:
            child.ask("ahead", more)
            self._going = True
        elif more >= LEAD // 2 or self._granted == self._taken:
            child.tell("allow", more)
        else:
            return
        self._granted = most

    def allow(self, steps: int | None) -> None:
        taken = self._taken if self._going else 0
        self._limit = None if steps is None else taken + steps
        if self._going and self._limit is not None and self._granted > self._limit:
            try:  # it had no requests for the steps that were allowed before
                self.engine.child.tell("allow", self._limit - self._granted)
                self._granted = self._limit
            except EngineDied:
                self._revive()

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop requests; a worker that ran ahead has no tokens that no event has reported."""
        every = request_ids is None
        asked = list(self._requests) if request_ids is None else request_ids
        ids = [name for name in asked if name in self._requests]
        unreported: list[Event] = []
        died = self._pending = False
        if ids and not self._going and self.engine.alive:
            try:
                unreported = self.engine.child.call("worker", "abort", None if every else ids)
            except EngineDied:
                died = True
        more = {event.request_id: len(event.token_ids) for event in unreported}
        for name in ids:
            if name in self._running:
                self.trace.left(name, self._now, len(self._reported[name]) + more.get(name, 0))
            self._forget(name)
        if died:
            self._revive()
        elif self._going and self.engine.alive:
            if every:
                self._halt()
            else:
                self._tell("abort", ids)
        return unreported

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id], self._reported[request_id]
        self._running.discard(request_id)

    def stop(self) -> None:
        if self._going and not self._halting and self.engine.alive:
            with suppress(EngineDied):  # `abort` finds out too
                self.engine.child.ask("halt")
                self._halting = True

    def _halt(self) -> None:
        """Stop a worker that runs ahead, and drop what it has drawn."""
        try:
            self.stop()
            self._going = self._halting = False
            self.engine.child.answer(self._count_ahead)
        except EngineDied:
            self._revive()

    def _count_ahead(self, answer: object) -> None:
        if isinstance(answer, Step):
            self.ahead_steps += answer.decode_steps

    def _tell(self, method: str, *arguments: object) -> None:
        try:
            self.engine.child.tell("worker", method, *arguments)
        except EngineDied:
            self._revive()  # which tells the new process everything

    def _revive(self) -> None:
        """Start another process, and resume all requests from the tokens reported."""
        self._forget_process()
        self.engine.revive()
        self._set_up()

    def _forget_process(self) -> None:
        """Prepare all requests to go on in another process."""
        if self._going and self._limit is not None:
            self._limit -= self._taken  # of those that the new process makes
        self._going = self._halting = self._pending = False
        for name in self._running:
            self.trace.left(name, self._now, len(self._reported[name]))
        self._running.clear()
        names = sorted(self._requests, key=lambda name: not self._reported[name])  # begun first
        self._requests = {name: self._resumed(name) for name in names}
        self._reported = {name: no_ids() for name in names}

    def _resumed(self, request_id: str) -> Request:
        request, drawn = self._requests[request_id], self._reported[request_id]
        expected = request.expected
        if expected is not None:
            expected = max(1.0, expected - len(drawn))
        return replace(request, prefix_ids=(*request.prefix_ids, *drawn), expected=expected)

    def _set_up(self) -> None:
        """Tell a new process everything that is known here."""
        while True:
            child = self.engine.child
            try:
                child.prefill = self._most_prefill
                child.call("admission", self.admission)
                child.tell("worker", "start_round", self._take_turns, self._ahead, self._version)
                child.tell("worker", "submit", list(self._requests.values()))
                self._known = child
                return
            except EngineDied:
                self.engine.revive()

    def _most_prefill(self) -> int:
        """Maximum number of tokens to prefill in a step: the longest waiting, one per slot."""
        waiting = (r for name, r in self._requests.items() if name not in self._running)
        tokens = (len(request.prompt_ids) + len(request.prefix_ids) for request in waiting)
        return sum(heapq.nlargest(self.admission.slots, tokens))
