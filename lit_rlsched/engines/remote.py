"""The trainer's side of a worker that runs in the engine's process."""

import sys
from array import array
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from enum import Enum

from lit_rlsched.engines.child import Child, OtherProcess
from lit_rlsched.engines.rollout_worker import EngineWorker
from lit_rlsched.engines.spec import EngineDied
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Event, Request, no_ids

LEAD = 1024
"""Maximum number of steps that wait to be reported; a step of 256 requests takes about 15 kB."""
NO_LIMIT = sys.maxsize
"""A number of steps that no round makes."""


class State(Enum):
    """What the worker in the engine's process does."""

    IDLE = "takes requests, and makes no step"
    STEPPING = "makes the steps that it was granted, each of which is an answer"
    HALTING = "was told to stop, and has not answered yet"


class RemoteWorker(EngineWorker):
    """Drives a `RolloutWorker` in the engine's process.

    Where the round allows it, that worker runs ahead: it makes up to `LEAD` steps before it is
    asked for them. This class reports them in order, so a round ends in the same step with the same
    tokens, however far the worker was ahead. Steps beyond the end are dropped and counted in
    `ahead_steps`.

    The worker is `IDLE` until it is asked for a step (`begin` or `advance`). It is then `STEPPING`
    until `stop`, and `HALTING` until `abort` has its answer. The next process is `IDLE`, whatever
    the one before was when it died: this class knows every request that runs or waits, with the
    tokens reported so far, and continues from them. The admission stays in its initial state: a
    copy in the engine's process does the work.
    """

    def __init__(self, engine: OtherProcess, admission: Admission) -> None:
        super().__init__(admission)
        self.engine = engine
        self.ahead_steps = 0
        """Decode steps of this round that were made but not asked for."""
        self.running: set[str] = set()
        self._requests: dict[str, tuple[Request, array[int]]] = {}
        """What runs or waits, each with its tokens reported since it was submitted."""
        self._state = State.IDLE
        self._granted = 0
        """Steps that it may make, or has made, beyond those taken."""
        self._left = NO_LIMIT
        """Number of steps that may be taken before the next `allow`."""
        self._round = False, 0
        """Whether it may run ahead, and the version of the policy."""
        self._now = 0.0
        self._known: Child | None = None
        """The process that was told of this worker."""
        self._set_up()

    def _set_up(self) -> None:
        """Tell a new process everything that is known here."""
        while True:
            child = self.engine.child
            try:
                child.call("admission", self.admission)
                child.tell("worker", "start_round", *self._round)
                child.tell("worker", "submit", [request for request, _ in self._requests.values()])
                self._known = child
                return
            except EngineDied:
                self.engine.revive()

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/engine_restarts": self.engine.restarts,
            "rollout/ahead_steps": self.ahead_steps,
        }

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def start_trace(self) -> RolloutTrace:
        trace = super().start_trace()
        self.ahead_steps = 0
        if self.engine.child is not self._known:  # the process died between rounds
            self._set_up()
        self._tell("start_trace")
        return trace

    def start_round(self, ahead: bool, version: int = 0) -> None:
        self._round, self._left = (ahead, version), NO_LIMIT
        self._tell("start_round", ahead, version)

    def submit(self, requests: Iterable[Request]) -> None:
        new = list(requests)
        for request in new:
            self._requests[request.id] = request, no_ids()
        self._tell("submit", new)

    def _tell(self, method: str, *arguments: object) -> None:
        try:
            self.engine.child.tell("worker", method, *arguments)
        except EngineDied:
            self._revive()  # which tells the new process everything

    def allow(self, steps: int | None) -> None:
        self._left = NO_LIMIT if steps is None else steps
        if self._granted > self._left:
            try:  # it had no requests for the steps that were allowed before
                self.engine.child.tell("allow", self._left - self._granted)
                self._granted = self._left
            except EngineDied:
                self._revive()

    def begin(self) -> int:
        """Ask for the next step, so that it runs beside those of other engines."""
        with suppress(EngineDied):  # `advance` finds out too
            self._grant()
        return 1

    def _grant(self) -> None:
        """Make sure that a step will come, and keep a worker that runs ahead going."""
        ahead, _ = self._round
        most = min(LEAD if ahead else 1, self._left)
        if self._state is State.IDLE:
            self.engine.child.ask("steps", most)
            self._state = State.STEPPING
        elif self._granted == 0 or most - self._granted >= LEAD // 2:
            self.engine.child.tell("allow", most - self._granted)
        else:
            return
        self._granted = most

    def advance(self, most: int | None = None) -> Step:
        while True:
            try:
                self._grant()
                step: Step = self.engine.child.answer()
                break
            except EngineDied:
                self._revive()
        self._granted -= 1
        self._left -= 1
        self.engine.deaths_in_a_row = 0
        self._now = step.end
        # a worker that ran ahead may have continued requests that were aborted here meanwhile
        admitted = [name for name in step.admitted if name in self._requests]
        self.running.update(admitted)
        step = replace(
            step,
            running=len(self.running),
            admitted=admitted,
            events=[event for event in step.events if event.request_id in self._requests],
            left={name: tokens for name, tokens in step.left.items() if name in self._requests},
        )
        for event in step.events:
            if event.finish_reason is None:
                _, reported = self._requests[event.request_id]
                reported.extend(event.token_ids)
            else:
                del self._requests[event.request_id]
                self.running.discard(event.request_id)
        return step

    def stop(self) -> None:
        if self.engine.alive and self._state is not State.HALTING:
            with suppress(EngineDied):  # `abort` finds out too
                self.engine.child.ask("halt")
                self._state = State.HALTING

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or all that run or wait, with all tokens that were not reported."""
        asked = list(self._requests) if request_ids is None else request_ids
        ids = [name for name in asked if name in self._requests]
        for name in ids:
            _, reported = self._requests.pop(name)
            if name in self.running:
                self.running.remove(name)
                self.trace.left(name, self._now, len(reported))
        if not self.engine.alive:
            return []
        if request_ids is None:
            self.stop()
            try:
                self.engine.child.answer(self._count_ahead)
                self._state, self._granted = State.IDLE, 0
            except EngineDied:
                self._revive()
        elif ids:
            self._tell("abort", ids)
        return []

    def _count_ahead(self, answer: object) -> None:
        if isinstance(answer, Step):
            self.ahead_steps += answer.decode_steps

    def _revive(self) -> None:
        """Start another process, and resume all requests from the tokens reported."""
        self._state, self._granted = State.IDLE, 0
        for name in self.running:
            self.trace.left(name, self._now, len(self._requests[name][1]))
        self.running.clear()
        begun_first = sorted(self._requests.values(), key=lambda held: not held[1])
        self._requests = {}
        for request, reported in begun_first:
            expected = request.expected
            if expected is not None:
                expected = max(1.0, expected - len(reported))
            prefix = *request.prefix_ids, *reported
            resumed = replace(request, prefix_ids=prefix, expected=expected)
            self._requests[request.id] = resumed, no_ids()
        self.engine.revive()
        self._set_up()
