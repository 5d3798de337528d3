"""A rollout in a thread of its own, beside the trainer."""

from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Background:
    """Runs one rollout at a time in a thread, and keeps the hooks that it calls for `wait`."""

    def __init__(self, heed: Callable[[], None]) -> None:
        self._trainer_heed = heed
        self._threads = futures.ThreadPoolExecutor(1, "rollout")
        self._rollout: futures.Future[None] | None = None
        self._held: list[Callable[[], None]] | None = None
        """Hooks that the rollout has not called yet; set before its thread begins."""
        self._closing = False

    @property
    def running(self) -> bool:
        """Whether a rollout was started, and not waited for."""
        return self._held is not None

    def start(self, decode: Callable[[], None]) -> None:
        """Run `decode` until `wait`."""
        self._held = []
        self._rollout = self._threads.submit(decode)

    def wait(self, waiting: AbstractContextManager[None]) -> None:
        """Wait for the rollout in the context `waiting`, then call the hooks that were kept.

        An exception of the rollout is raised here.
        """
        rollout, held = self._rollout, self._held
        assert rollout is not None and held is not None
        try:
            with waiting:
                futures.wait([rollout])
        except BaseException:  # a second Ctrl-C
            self._closing = True
            raise
        self._rollout = self._held = None
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
