"""The process of a `ProcessEngine` or `RayEngine`: answers one message after the other."""

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from lit_rlsched.engines.base import RolloutEngine, RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.processes import die_with
from lit_rlsched.scheduling.admission import Admission


class Server:
    """Serves an engine to the process of the trainer.

    A message is a number (0: no answer is expected), the name of a method below, and its arguments.
    A worker steps as long as it is busy and allowed to; the server looks for a message between two
    steps.
    """

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Pickled answers; None: there are no more."""
        self._engine: RolloutEngine | None = None
        self._worker: RolloutWorker | None = None
        self._most: int | None = None
        """Maximum number of decode steps per step: 1 where engines step together."""
        self._ahead = 0
        """Number of the message that told the worker to step; 0: it was told to stop."""
        self._allowed = 0
        """Number of steps that it may still make."""
        self._asked = 0
        """Number of the message that is answered."""

    def serve(self, inbox: Any) -> None:
        """Answer messages until the trainer sends `close` or is gone.

        `inbox` is a connection, or has its methods `poll` and `recv`.
        """
        while True:
            try:
                waits = not self.runs or inbox.poll(0)
                message = inbox.recv() if waits else None
            except (EOFError, OSError):
                return  # the trainer is gone
            if not self.handle(message):
                return

    @property
    def runs(self) -> bool:
        """Whether the worker makes its next step without being asked."""
        worker = self._worker
        return worker is not None and self._ahead > 0 and self._allowed > 0 and worker.busy

    def handle(self, message: Sequence[Any] | None) -> bool:
        """Answer a message or, without one, let the worker step; return False after `close`."""
        try:
            if message is None:
                assert self._worker is not None
                self._asked = self._ahead
                self._allowed -= 1
                self._send(self._worker.advance(self._most))
                return True
            self._asked, name, *arguments = message
            if name == "close":
                if self._engine is not None:
                    self._engine.close()
                return False
            getattr(self, name)(*arguments)
        except Exception as error:
            self._ahead = 0
            try:
                pickled = pickle.dumps(error)
                pickle.loads(pickled)
            except Exception:
                pickled = b""
            self._send((pickled, traceback.format_exc()), raised=True)
        return True

    def start(self, engine: bytes, spec: EngineSpec) -> None:
        self._engine = cloudpickle.loads(engine)
        self._engine.ends_with_process = True
        try:
            self._engine.start(spec)
        except Exception:
            spec.check_model()
            raise
        self._most = 1 if spec.engines > 1 else None
        self._send((self._engine.kv_block, self._engine.kv_capacity))

    def engine(self, method: str, *arguments: Any) -> None:
        self._send(getattr(self._engine, method)(*arguments))

    def admission(self, admission: Admission) -> None:
        assert self._engine is not None
        self._worker = RolloutWorker(self._engine, admission)
        self._send(None)

    def worker(self, method: str, *arguments: Any) -> None:
        answer = getattr(self._worker, method)(*arguments)
        if self._asked:
            self._send(answer)

    def steps(self, steps: int) -> None:
        """Let the worker make so many steps; each is an answer."""
        self._ahead, self._allowed = self._asked, steps

    def allow(self, steps: int) -> None:
        """Change the number of steps that it may make; a negative number takes some back."""
        self._allowed += steps

    def halt(self) -> None:
        """Stop the worker and drop its requests."""
        self._ahead = 0
        if self._worker is not None:  # a process that came between rounds has none yet
            self._worker.abort()
        self._send(None)

    def _send(self, value: Any, raised: bool = False) -> None:
        answer = self._asked, raised, value
        self.outbox.put(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))


def deliver(outbox: "queue.SimpleQueue[bytes | None]", connection: Connection) -> None:
    """Send answers to the trainer, until it is gone."""
    with suppress(OSError):
        while answer := outbox.get():
            connection.send_bytes(answer)


def main(cores: str, connection: int, lifeline: int, parent: int) -> None:
    die_with(parent, lifeline)
    if cores and hasattr(os, "sched_setaffinity"):  # before torch counts the cores
        os.sched_setaffinity(0, map(int, cores.split(",")))
    server, pipe = Server(), Connection(connection)
    # the trainer does not read while it computes: a full pipe must not block the engine
    threading.Thread(target=deliver, args=(server.outbox, pipe), daemon=True).start()
    server.serve(pipe)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
