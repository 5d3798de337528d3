"""The Ray actor of a `RayEngine`: the server of an engine, with Ray's calls in place of a pipe.

The class is sent to its node by value, and imports the package only if the node has the same
version.
"""

import os
import queue
import threading
from collections.abc import Sequence
from typing import Any


class EngineActor:
    """Serves an engine in a thread of its own.

    Calls of an actor with several threads may overtake each other, so messages are numbered.
    """

    def __init__(self, version: str, hidden: Sequence[str]) -> None:
        for name in hidden:
            os.environ.pop(name, None)
        self._lock = threading.Lock()
        self._early: dict[int, Any] = {}
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._passed_on = 0
        """Number of messages in the inbox so far."""
        try:
            from lit_rlsched import __version__

            self._version: str | None = __version__
        except ImportError:
            self._version = None
        if self._version == version:
            from lit_rlsched.engines._engine_server import Server

            self._server = Server()
            self._thread = threading.Thread(target=self._serve, daemon=True, name="engine")
            self._thread.start()

    def hello(self) -> tuple[str | None, str, str, int]:
        """Return the package's version here, the node's id and address, and the process id."""
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return self._version, node, str(address), os.getpid()

    def tell(self, number: int, message: Sequence[Any]) -> None:
        """Pass a message on to the server, after those with lower numbers."""
        with self._lock:
            self._early[number] = message
            while self._passed_on in self._early:
                self._inbox.put(self._early.pop(self._passed_on))
                self._passed_on += 1

    def answers(self) -> list[bytes | None]:
        """Return all answers of the server that are there, or wait for the next one."""
        outbox = self._server.outbox
        batch = [outbox.get()]
        while not outbox.empty():
            batch.append(outbox.get())
        return batch

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._thread.join()

    def poll(self, timeout: float) -> bool:
        """Whether there is a message for the server."""
        return not self._inbox.empty()

    def recv(self) -> Any:
        """Return the next message for the server."""
        return self._inbox.get()

    def _serve(self) -> None:
        try:
            self._server.serve(self)
        finally:
            self._server.outbox.put(None)
