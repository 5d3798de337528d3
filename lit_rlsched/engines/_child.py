"""The process of a `ProcessEngine`: answers one message after the other."""

import mmap
import pickle
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.engines.process import Entry, view
from lit_rlsched.rewards.worker import die_with
from lit_rlsched.rollout.worker import RolloutWorker
from lit_rlsched.scheduling.admission import Admission


class Server:
    """The engine and, once there is an admission, the worker that keeps its slots filled.

    A worker that was told to run ahead steps as long as it has something to do, and looks for a
    message in between.
    """

    def __init__(self, connection: Connection, weights: int) -> None:
        self._connection = connection
        self._weights = weights
        self._memory: mmap.mmap | None = None
        self._engine: RolloutEngine
        self._worker: RolloutWorker | None = None
        self._ahead = False
        self._outbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        # a trainer that computes does not read: a full pipe must not hold the engine up
        threading.Thread(target=self._deliver, daemon=True).start()

    def serve(self) -> None:
        """Until the trainer says `close`, or is gone."""
        (engine,) = self._receive()
        self._engine = cloudpickle.loads(engine)
        while True:
            worker = self._worker
            runs = self._ahead and worker is not None and worker.busy
            try:
                if runs and not self._connection.poll(0):
                    assert worker is not None
                    self._send("step", worker.advance())
                    continue
                name, *arguments = self._receive()
                if name == "close":
                    return self._engine.close()
                getattr(self, name)(*arguments)
            except (EOFError, ConnectionResetError):
                return
            except Exception as error:
                self._ahead = False
                self._send("raised", (_pickled(error), traceback.format_exc()))

    def start(self, spec: EngineSpec) -> None:
        self._engine.start(spec)
        self._send("value", (self._engine.kv_block, self._engine.kv_capacity))

    def engine(self, method: str, *arguments: Any) -> None:
        self._send("value", getattr(self._engine, method)(*arguments))

    def weights(self, size: int, entries: list[Entry], version: int) -> None:
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._weights, size)
        memory = self._memory
        named = ((entry.name, view(memory, entry)) for entry in entries)
        self._engine.sync_weights(named, version)
        self._send("value", None)

    def admission(self, admission: Admission) -> None:
        self._worker = RolloutWorker(self._engine, admission)
        self._send("value", None)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the worker of which nobody waits for an answer."""
        assert self._worker is not None
        getattr(self._worker, method)(*arguments)

    def step(self) -> None:
        assert self._worker is not None
        self._send("step", self._worker.advance())

    def abort(self, request_ids: list[str] | None) -> None:
        assert self._worker is not None
        self._send("value", self._worker.abort(request_ids))

    def ahead(self, ahead: bool) -> None:
        self._ahead = ahead

    def halt(self) -> None:
        """Drop everything, and stop."""
        assert self._worker is not None
        self._ahead = False
        self._worker.abort()
        self._send("halted", None)

    def _receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def _send(self, kind: str, value: Any) -> None:
        self._outbox.put((kind, value))

    def _deliver(self) -> None:
        while True:
            message = self._outbox.get()
            try:
                data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
                self._connection.send_bytes(data)
            except OSError:
                return  # the trainer is gone


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return b""


def main(connection: int, lifeline: int, weights: int, parent: int) -> None:
    die_with(parent, lifeline)
    Server(Connection(connection), weights).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
