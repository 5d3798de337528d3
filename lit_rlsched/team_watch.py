"""Notices a rank that has died or stopped, also while this one waits in a collective."""

import os
import secrets
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

BEAT = 2.0
"""Seconds between two signs of life."""
SILENCE = 120.0
"""Seconds without a sign of life after which a rank counts as stopped."""
GRACE = 3.0
"""Seconds for the main thread to end the run after another rank has failed."""

_ALIVE, _DONE = "alive", "done"


class TeamWatch:
    """Connections between the leader and the other ranks for signs of life and last words.

    If a rank fails, dies or stops, every other rank prints a sentence that names it. A main thread
    that has not raised an error of its own after `GRACE` seconds waits for that rank in a
    collective, and its process ends with exit code 1.

    Args:
        rank: Rank of this process.
        all_gather: Collects a value of each rank.
    """

    def __init__(self, rank: int, all_gather: Callable[[Any], list[Any]]) -> None:
        self._cause: str | None = None
        self._failed = threading.Event()
        self._rank = rank
        self._ending = threading.Event()
        self._sending = threading.Lock()
        self._connections: dict[int, Connection[Any, Any]] = {}
        host, key = os.environ.get("MASTER_ADDR", "127.0.0.1"), secrets.token_bytes(32)
        if rank == 0:
            with Listener((host, 0), backlog=1024, authkey=key) as listener:
                ranks = all_gather((os.getpid(), listener.address[1], key))
                for _ in ranks[1:]:
                    connection = listener.accept()
                    self._connections[connection.recv()] = connection
        else:
            ranks = all_gather((os.getpid(), None, None))
            _, port, key = ranks[0]
            self._connections[0] = Client((host, port), authkey=key)
            self._connections[0].send(rank)
        self._names = [f"Rank {i} (process {pid})" for i, (pid, *_) in enumerate(ranks)]
        threading.Thread(target=self._beat, daemon=True, name="team-beat").start()
        for other in self._connections:
            threading.Thread(
                target=self._listen, args=(other,), daemon=True, name=f"team-watch-{other}"
            ).start()

    def cause(self, seconds: float) -> str | None:
        """Wait at most so long, and return which other rank has failed first, and how."""
        self._failed.wait(seconds)
        return self._cause

    def tell(self, message: str) -> None:
        """Tell the other ranks why this one ends."""
        self._ending.set()
        self._send(f"{self._names[self._rank]} has failed: {message}")

    def close(self) -> None:
        """Tell the other ranks that this one ends as it should."""
        if not self._ending.is_set():
            self._ending.set()
            self._send(_DONE)

    def _send(self, message: str) -> None:
        with self._sending:
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.send(message)

    def _beat(self) -> None:
        while not self._ending.wait(BEAT):
            self._send(_ALIVE)

    def _listen(self, other: int) -> None:
        """Wait until another rank ends, and end this one if that is an error."""
        name = self._names[other]
        message = _ALIVE
        while message == _ALIVE:
            try:
                silent = not self._connections[other].poll(SILENCE)
                message = (
                    f"{name} shows no sign of life" if silent else self._connections[other].recv()
                )
            except (OSError, EOFError):
                message = f"{name} has died"
        if message == _DONE or self._cause is not None:
            return
        self._cause = message
        self._failed.set()
        if self._ending.is_set():
            return
        print(f"error: {message}. The run ends.", file=sys.stderr, flush=True)
        if self._rank == 0:
            self._send(message)
        if not self._ending.wait(GRACE):
            os._exit(1)
