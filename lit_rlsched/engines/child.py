"""The trainer's side of an engine's process: the messages, the time limits and the end."""

import math
import os
import pickle
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import cloudpickle

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineBroken, EngineDied
from lit_rlsched.processes import ChildProcess, how_it_ended
from lit_rlsched.settings import UsageError

LAUNCHER = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables of the Trainer's ranks, which an engine must not take for its own."""
SHUTDOWN = 10.0
"""Seconds for the engine to close before its process is killed."""
TICK = 1.0
"""Seconds between two checks of a time limit."""


class Watch:
    """A thread that kills a process which takes too long to answer, so that the wait ends.

    Time in which this process was stopped, or the machine slept, does not count: at most `TICK`
    from one look to the next.
    """

    def __init__(self, kill: Callable[[float], None]) -> None:
        self._kill = kill
        self._wait: list[float] | None = None
        """Seconds of the current wait; None: nobody waits."""
        self._limit: Callable[[], float] = lambda: math.inf
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="engine-watch").start()

    @contextmanager
    def waiting(self, limit: Callable[[], float]) -> Iterator[None]:
        """Watch the wait inside; `limit` returns the maximum seconds and is asked at each tick."""
        self._limit, self._wait = limit, [0.0]
        try:
            yield
        finally:
            self._wait = None

    def end(self) -> None:
        """End the thread."""
        self._ended.set()

    def tick(self, seconds: float) -> None:
        """Count the time since the last tick, and kill the process if it is over its limit."""
        if (wait := self._wait) is None:
            return
        wait[0] += min(seconds, TICK)
        if wait[0] > self._limit() and self._wait is wait:
            self._wait = None
            self._kill(wait[0])

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(TICK):
            now = time.monotonic()
            self.tick(now - last)
            last = now


def pickled_engine(engine: RolloutEngine) -> bytes:
    """Pickle an engine for its process."""
    try:
        return cloudpickle.dumps(engine)
    except Exception as error:
        raise UsageError(
            f"`{type(engine).__name__}` cannot be sent to another process: {error}. Let it open "
            "what cannot be pickled in `start`."
        ) from error


class Child(ABC):
    """An engine's process, which answers messages.

    `limit` returns the maximum seconds of a wait for an answer, given whether the engine starts.
    """

    pid: int | None = None
    """Process id on the node where the process runs; None: it is not known yet."""

    def __init__(self, limit: Callable[[bool], float], name: str) -> None:
        self._limit_of, self._name = limit, name
        self._asked = 0
        """Number of the last message that has an answer."""
        self._starts = False
        """Whether the last message was that to start."""
        self._end: str | None = None
        """How the process ended."""
        self._fault = ""
        """What was wrong with it before."""
        self._watch = Watch(self._kill_hanging)

    @abstractmethod
    def post(self, message: tuple[Any, ...]) -> None:
        """Send a message to the server of the process."""

    @abstractmethod
    def take(self) -> Any:
        """Return the next answer of the server."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until the server has ended after `close`, at most so many seconds."""

    @abstractmethod
    def strike(self) -> None:
        """Kill the process and those that it started, while another thread waits for it."""

    @abstractmethod
    def end(self) -> str:
        """Kill the process, free what belongs to it and return how it ended."""

    def call(self, *message: Any) -> Any:
        """Send a message and return its answer."""
        self.ask(*message)
        return self.answer()

    def ask(self, *message: Any) -> None:
        """Send a message that has one or more answers."""
        self._asked += 1
        self._starts = message[0] == "start"
        self._send(self._asked, *message)

    def answer(self, skipped: Callable[[Any], object] = lambda value: None) -> Any:
        """Return the next answer to the last message that was asked; others are `skipped`."""
        while True:
            number, raised, value = self._receive()
            if raised and number in (0, self._asked):
                error = unpickled(value, self._name)
                if isinstance(error, EngineBroken):
                    self._fault = f"lost a part of its engine ({error})"
                    raise EngineDied(self.kill()) from error
                raise error
            if number == self._asked:
                return value
            skipped(value)

    def tell(self, *message: Any) -> None:
        """Send a message that has no answer."""
        self._send(0, *message)

    def _send(self, *message: Any) -> None:
        try:
            with self._watch.waiting(self._limit):
                self.post(message)
        except OSError:
            raise EngineDied(self.kill()) from None

    def _receive(self) -> Any:
        """Return the number of the answered message, whether it raised, and the value."""
        try:
            with self._watch.waiting(self._limit):
                return self.take()
        except (OSError, EOFError):
            raise EngineDied(self.kill()) from None

    def _limit(self) -> float:
        return self._limit_of(self._starts)

    def _kill_hanging(self, seconds: float) -> None:
        self._fault = f"did not answer for {seconds:.0f} s and was killed"
        self.strike()

    def kill(self) -> str:
        """Kill the process and all processes it started; return how it ended."""
        if self._end is None:
            self._watch.end()
            ended = self.end()
            self._end = self._fault or ended
        return self._end

    def close(self) -> None:
        """Let the engine close, then end the process."""
        try:
            if self._end is None:
                with suppress(EngineDied):
                    self.tell("close")
                    self.wait(SHUTDOWN)
        finally:
            self.kill()


class PipeChild(Child):
    """An engine in a child process of this one."""

    def __init__(
        self,
        limit: Callable[[bool], float],
        name: str,
        variables: Mapping[str, str],
        cores: Sequence[int] | None,
    ) -> None:
        super().__init__(limit, name)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
        self._child = ChildProcess(
            ["-m", "lit_rlsched.engines._engine_server", ",".join(map(str, cores or ()))],
            {**inherited, **variables, "PYTHONPATH": path},
        )
        self.connection, self._process = self._child.connection, self._child.process
        self.pid = self._process.pid

    def post(self, message: tuple[Any, ...]) -> None:
        self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def take(self) -> Any:
        return pickle.loads(self.connection.recv_bytes())

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def strike(self) -> None:
        self._child.kill_group()

    def end(self) -> str:
        self.wait(0.5)  # if it is exiting, its own exit code is wanted
        self.strike()
        self._process.wait()
        self._child.close()
        return how_it_ended(self._process.returncode)


def unpickled(error: tuple[bytes, str], name: str) -> BaseException:
    """Return an exception of an engine's process, with its traceback there."""
    pickled, text = error
    try:
        raised: BaseException = pickle.loads(pickled)
    except Exception:
        last_line = text.rstrip().rpartition("\n")[2]
        raised = RuntimeError(
            f"The process of {name} raised an exception that cannot be pickled: {last_line}"
        )
    raised.add_note(f"In the process of {name}:\n{text}")
    return raised


class OtherProcess(Protocol):
    """A `ProcessEngine`, as far as its worker and its weights know it."""

    restarts: int
    deaths_in_a_row: int
    gpus_advice: str

    @property
    def child(self) -> Child: ...
    @property
    def alive(self) -> bool: ...
    @property
    def numbered_name(self) -> str: ...
    @property
    def trainer_address(self) -> str: ...
    def revive(self) -> None: ...
