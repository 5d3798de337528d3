"""The trainer's side of a worker that runs in the engine's process."""

from array import array
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from lit_rlsched.engines.child import Child, ReplacedEngine
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
    process dies, the next process continues from them. The admission stays in its initial state: a
    copy in the engine's process does the work.
    """

    def __init__(self, engine: ReplacedEngine, admission: Admission) -> None:
        super().__init__(admission)
        self.engine = engine
        self.ahead_steps = 0
        """Decode steps of this round that were made but not asked for."""
        self._requests: dict[str, Request] = {}
        self._reported: dict[str, array[int]] = {}
        """Tokens of each request since it was submitted."""
        self._running: set[str] = set()
        self._ahead = False
        self._granted: int | None = None
        """Steps that it may make, or has made, beyond those taken; None: it was told to stop."""
        self._halting = False
        """Whether its answer to that is still to come."""
        self._left: int | None = None
        """Number of steps that may be taken before the next `allow`."""
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

    def start_round(self, ahead: bool, version: int = 0) -> None:
        self._ahead, self._left = ahead, None
        self._version = version
        self._tell("start_round", ahead, version)

    def submit(self, requests: Iterable[Request]) -> None:
        new = list(requests)
        for request in new:
            self._requests[request.id] = request
            self._reported[request.id] = no_ids()
        self._tell("submit", new)

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
        assert self._granted is not None
        self._granted -= 1
        self.engine.stepped()
        if self._left is not None:
            self._left -= 1
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
        lead = LEAD if self._ahead else 1
        most = lead if self._left is None else min(lead, self._left)
        if self._granted is None:
            self.engine.child.ask("steps", most)
        elif self._granted == 0 or most - self._granted >= LEAD // 2:
            self.engine.child.tell("allow", most - self._granted)
        else:
            return
        self._granted = most

    def allow(self, steps: int | None) -> None:
        self._left = steps
        if self._granted is not None and steps is not None and self._granted > steps:
            try:  # it had no requests for the steps that were allowed before
                self.engine.child.tell("allow", steps - self._granted)
                self._granted = steps
            except EngineDied:
                self._revive()

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or all that run or wait, with all tokens that were not reported."""
        asked = list(self._requests) if request_ids is None else request_ids
        ids = [name for name in asked if name in self._requests]
        for name in ids:
            if name in self._running:
                self.trace.left(name, self._now, len(self._reported[name]))
            self._forget(name)
        if not self.engine.alive:
            return []
        if request_ids is None:
            self._halt()
        elif ids:
            self._tell("abort", ids)
        return []

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id], self._reported[request_id]
        self._running.discard(request_id)

    def stop(self) -> None:
        if self.engine.alive and not self._halting:
            with suppress(EngineDied):  # `abort` finds out too
                self.engine.child.ask("halt")
                self._halting = True

    def _halt(self) -> None:
        """Stop the worker, and drop what it has drawn."""
        try:
            self.stop()
            self.engine.child.answer(self._count_ahead)
            self._granted, self._halting = None, False
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
        self._granted, self._halting = None, False
        for name in self._running:
            self.trace.left(name, self._now, len(self._reported[name]))
        self._running.clear()
        names = sorted(self._requests, key=lambda name: not self._reported[name])  # begun first
        self._requests = {name: self._resumed(name) for name in names}
        self._reported = {name: no_ids() for name in names}
        self.engine.revive()
        self._set_up()

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
                child.call("admission", self.admission)
                child.tell("worker", "start_round", self._ahead, self._version)
                child.tell("worker", "submit", list(self._requests.values()))
                self._known = child
                return
            except EngineDied:
                self.engine.revive()
