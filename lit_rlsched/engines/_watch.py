"""Ends a wait for a process that hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lit_rlsched.scheduling.hangs import RunningClock

TICK = 1.0


class Watch:
    """A thread that kills a process which is waited for too long, so that the wait ends.

    Args:
        kill: Called with the seconds that were waited.
    """

    def __init__(self, kill: Callable[[float], None]) -> None:
        self._kill = kill
        self._wait: tuple[RunningClock, Callable[[], float]] | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="engine-watch").start()

    @contextmanager
    def waiting(self, limit: Callable[[], float]) -> Iterator[None]:
        """Somebody waits inside; `limit` is asked now and then how long that may last."""
        self._wait = RunningClock(TICK), limit
        try:
            yield
        finally:
            self._wait = None

    def end(self) -> None:
        """Nobody waits any more."""
        self._ended.set()

    def tick(self, seconds: float) -> None:
        """So much time has passed since the last tick."""
        wait = self._wait
        if wait is None:
            return
        clock, limit = wait
        if clock.advance(seconds) > limit() and self._wait is wait:
            self._wait = None
            self._kill(clock.seconds)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(TICK):
            now = time.monotonic()
            self.tick(now - last)
            last = now
