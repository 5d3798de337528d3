"""The process of a `ProcessEngine`: answers one message after the other."""

import pickle
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from lit_rlsched._environment import hide_environment
from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.engines.rollout_worker import RolloutWorker
from lit_rlsched.processes import die_with
from lit_rlsched.refusals import is_refusal
from lit_rlsched.scheduling.admission import Admission


class Server:
    """The engine and, once there is an admission, the worker that keeps its slots filled.

    A worker that was told to run ahead steps as long as it has something to do, and looks for a
    message in between.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: RolloutEngine
        self._worker: RolloutWorker | None = None
        self._ahead = 0
        """Number of the message that told the worker to run ahead."""
        self._asked = 0
        """Number of the message that is answered; 0: none is expected."""
        self._began = 0.0
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # a trainer that computes does not read: a full pipe must not hold the engine up
        threading.Thread(target=self._deliver, daemon=True).start()

    def serve(self) -> None:
        """Until the trainer says `close`, or is gone."""
        _, engine = self._receive()
        self._engine = cloudpickle.loads(engine)
        self._engine.ends_with_process = True
        while True:
            worker = self._worker
            runs = worker is not None and self._ahead and worker.busy
            try:
                waits = not runs or self._connection.poll(0)
                message = self._receive() if waits else None
            except (EOFError, OSError):
                return  # the trainer is gone
            self._began = time.monotonic()
            try:
                if message is None:
                    assert worker is not None
                    self._asked = self._ahead
                    self._send(worker.advance())
                    continue
                self._asked, name, *arguments = message
                if name == "close":
                    return self._engine.close()
                getattr(self, name)(*arguments)
            except Exception as error:
                self._ahead = 0
                failure = _pickled(error), traceback.format_exc(), is_refusal(error)
                self._send(failure, raised=True)

    def start(self, spec: EngineSpec) -> None:
        self._engine.start(spec)
        self._send((self._engine.kv_block, self._engine.kv_capacity))

    def engine(self, method: str, *arguments: Any) -> None:
        self._send(getattr(self._engine, method)(*arguments))

    def admission(self, admission: Admission) -> None:
        self._worker = RolloutWorker(self._engine, admission)
        self._send(None)

    def worker(self, method: str, *arguments: Any) -> None:
        """Call a method of the worker; where it was only told, nobody waits for the answer."""
        assert self._worker is not None
        answer = getattr(self._worker, method)(*arguments)
        if self._asked:
            self._send(answer)

    def ahead(self) -> None:
        """Step without being asked, from now on."""
        self._ahead = self._asked

    def halt(self) -> None:
        """Drop everything, and stop."""
        assert self._worker is not None
        self._ahead = 0
        self._worker.abort()
        self._send(None)

    def _receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def _send(self, value: Any, raised: bool = False) -> None:
        answer = (self._asked, raised, value, time.monotonic() - self._began)
        self._outbox.put(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))

    def _deliver(self) -> None:
        while True:
            try:
                self._connection.send_bytes(self._outbox.get())
            except OSError:
                return  # the trainer is gone


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return b""


def main(connection: int, lifeline: int, parent: int) -> None:
    die_with(parent, lifeline)
    hide_environment()  # reward workers may read it
    Server(Connection(connection)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
