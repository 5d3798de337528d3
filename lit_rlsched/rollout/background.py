"""A rollout in a thread of its own, beside the trainer."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.meetings import Meetings
from lit_rlsched.scheduling.in_flight_updates import InFlight

T = TypeVar("T")


class Background:
    """Runs one rollout at a time in a thread, and keeps the hooks that it calls for `wait`."""

    def __init__(self, in_flight: InFlight | None, heed: Callable[[], None]) -> None:
        self._in_flight, self._trainer_heed = in_flight, heed
        self._threads = futures.ThreadPoolExecutor(1, "rollout")
        self._rollout: futures.Future[None] | None = None
        self._held: list[Callable[[], None]] | None = None
        """Hooks that the rollout has not called yet."""
        self._controller: RolloutController | None = None
        self._closing = False
        self.wanted = threading.Event()
        """Set while the trainer waits for the rollout."""
        self.meetings: Meetings | None = None
        """Of the current or last rollout."""

    @property
    def running(self) -> bool:
        """Whether a rollout was started, and not waited for."""
        return self._held is not None

    def start(
        self, decode: Callable[[], None], controller: RolloutController, version: int
    ) -> None:
        """Run `decode`, the controller's rollout that began with a policy version, until `wait`."""
        self._held, self._controller = [], controller
        self.wanted.clear()
        if (how := self._in_flight) is not None:
            replay = None if how.replay is None else how.replay.get(version, ())
            self.meetings = meetings = Meetings(how.pace, how.turns, replay)
            controller.before_step = meetings.before_step
            decode = partial(_with_end, decode, meetings.end)
        self._rollout = self._threads.submit(decode)

    @contextmanager
    def meeting(self) -> Iterator[InFlight | None]:
        """Stop the rollout between two steps for the block, where the schedule says so."""
        if self._rollout is None or self._in_flight is None or self.meetings is None:
            yield None
            return
        with self.meetings.trainer() as met:
            yield self._in_flight if met else None

    def wait(self, waiting: AbstractContextManager[None]) -> None:
        """Wait for the rollout in the context `waiting`, then call the hooks that were kept.

        An exception of the rollout is raised here.
        """
        rollout, held, controller = self._rollout, self._held, self._controller
        assert rollout is not None and held is not None and controller is not None
        self.wanted.set()
        if self.meetings is not None:
            self.meetings.release()
        try:
            with waiting:
                futures.wait([rollout])
        except BaseException:  # a second Ctrl-C
            self._closing = True
            raise
        self._rollout = self._held = controller.before_step = None
        rollout.result()
        for hook in held:
            hook()

    def heed(self) -> None:
        """Called by the rollout before each step, wherever it runs."""
        if self._held is None:
            self._trainer_heed()
        elif self._closing:
            raise futures.CancelledError

    def kept(self, hook: Callable[[T], None]) -> Callable[[T], None]:
        """Return a hook that `wait` calls, if the rollout in the background has called it."""

        def call(of: T) -> None:
            if self._held is not None:
                self._held.append(partial(hook, of))
            else:
                hook(of)

        return call

    def close(self) -> None:
        """Let the rollout end at its next step."""
        self._closing = True

    def shutdown(self) -> None:
        """Wait until the thread has ended."""
        if self._rollout is not None:
            futures.wait([self._rollout])
        self._threads.shutdown()


def _with_end(decode: Callable[[], None], end: Callable[[], None]) -> None:
    try:
        decode()
    finally:
        end()
