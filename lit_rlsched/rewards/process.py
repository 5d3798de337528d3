"""The parent's side of one reward worker: what it was sent and what it still owes."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STARTUP_TIMEOUT = 300.0
"""Seconds a worker may take to import the reward functions."""
ASYNC_GRACE = 1.0
"""Seconds an event loop gets to time its coroutines out before the worker is killed."""

_SCRIPT = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one call of one function, as the worker sends it."""

    seconds: float | None
    score: float | None
    failure: str | None
    extra: dict[str, Any]
    metrics: dict[str, list[float]]


@dataclass(slots=True)
class Job:
    """One completion on its way through the functions."""

    key: int
    id: Hashable
    payload: bytes
    timeout: float
    results: list[Result | None]
    alone: bool = False
    """Not to be sent together with others."""

    @property
    def complete(self) -> bool:
        return None not in self.results


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One process of `worker.py`.

    It runs the sync calls of its batch in order, so the first one unanswered is the one that runs;
    then all coroutines of the batch together.
    """

    pickled: list[bytes]
    is_async: list[bool]
    ready: bool = False
    loading: int = 0
    start_error: str = ""
    deadline: float = 0.0
    limit: float = STARTUP_TIMEOUT
    begun: bool = False
    """Whether it has told that it works on what it was sent: before that, its end is no call's."""
    jobs: list[int] = field(default_factory=list)
    calls: deque[tuple[int, int]] = field(default_factory=deque)
    coroutines: set[tuple[int, int]] = field(default_factory=set)
    timeouts: dict[int, float] = field(default_factory=dict)
    connection: Connection = field(init=False)
    process: "subprocess.Popen[bytes]" = field(init=False)
    lifeline: int = field(init=False)

    def __post_init__(self) -> None:
        self.connection, theirs = Pipe()
        read, self.lifeline = os.pipe()
        descriptors = [theirs.fileno(), read]
        # Not multiprocessing: that would run an unguarded user script once more in each worker.
        # A session of its own: Ctrl-C stays with the trainer, and killing its process group ends
        # what a reward function started too.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), *map(str, descriptors), str(os.getpid())],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            # the same hash order in every worker: what walks through a set (sympy) scores the same
            env={"PYTHONHASHSEED": "0", **os.environ},
            start_new_session=True,
        )
        theirs.close()
        os.close(read)
        setup = {
            "sys_path": [path or os.getcwd() for path in sys.path],
            "functions": self.pickled,
            "is_async": self.is_async,
        }
        self.deadline = time.monotonic() + STARTUP_TIMEOUT
        self._send(setup)

    @property
    def busy(self) -> bool:
        return bool(self.calls or self.coroutines)

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def assign(self, batch: list[Job]) -> None:
        """Send these jobs; the worker must be waiting for some."""
        message = []
        self.begun = False
        self.jobs = [job.key for job in batch]
        self.timeouts = {job.key: job.timeout for job in batch}
        for job in batch:
            todo = [index for index, result in enumerate(job.results) if result is None]
            message.append((job.key, job.payload, [(index, job.timeout) for index in todo]))
            self.calls.extend((job.key, index) for index in todo if not self.is_async[index])
            self.coroutines.update((job.key, index) for index in todo if self.is_async[index])
        self._send(message)
        self._started(time.monotonic())

    def began(self, stamp: float) -> None:
        """It took up the batch at this time of its clock, which is ours."""
        self.begun = True
        self._started(stamp)

    def reported(self, key: int, index: int, stamp: float) -> None:
        """A call came to its end at this time."""
        if self.is_async[index]:
            self.coroutines.discard((key, index))
            if not self.busy:
                self.deadline = math.inf
        else:
            call = self.calls.popleft()
            assert call == (key, index), "reward worker out of step"
            self._started(stamp)

    def at_fault(self) -> list[tuple[int, int]]:
        """The calls that may have been running, if they belong to one completion."""
        if not self.begun:
            return []
        if self.calls:
            return [self.calls[0]]
        if len({key for key, _ in self.coroutines}) == 1:
            return sorted(self.coroutines)
        return []

    def kill(self) -> str:
        """Kill the process and all it started; says what it had died of if it was dead."""
        # before `wait`: a process not yet waited for keeps its number, and its own exit code
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self.connection.close()
        os.close(self.lifeline)
        code = self.process.returncode
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"died of {names.get(-code, f'signal {-code}')}"
        return f"exited with code {code}"

    def _started(self, stamp: float) -> None:
        """The next call began at this time."""
        if self.calls:
            self.limit = self.timeouts[self.calls[0][0]]
            self.deadline = stamp + self.limit
        elif self.coroutines:
            self.limit = max(self.timeouts[key] for key, _ in self.coroutines) + ASYNC_GRACE
            self.deadline = stamp + self.limit
        else:
            self.deadline = math.inf

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # died meanwhile: its end is noticed when we read
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
