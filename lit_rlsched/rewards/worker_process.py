"""The parent's side of one reward worker: what it was sent and what it still owes."""

import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lit_rlsched.processes import ChildProcess, how_it_ended
from lit_rlsched.rewards.cgroup import MemoryGroup, new_group
from lit_rlsched.rewards.jobs import BadMessage, Job
from lit_rlsched.rewards.memory import held_memory

STARTUP_TIMEOUT = 300.0
"""Seconds a worker may take to import the reward functions."""
ASYNC_GRACE = 1.0
"""Seconds an event loop gets to time its coroutines out before the worker is killed."""
PIPE_TIMEOUT = 30.0
"""Seconds a message may take to cross, once begun: a worker that was stopped does not read on."""

_MARK = "LIT_RLSCHED_REWARD_WORKER"
"""Environment variable that tells, of any process, which worker it comes from."""
_SCRIPT = Path(__file__).with_name("reward_worker.py")


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One process of `reward_worker.py`.

    It runs the sync calls of its batch in order, so the first one unanswered is the one that runs;
    then all coroutines of the batch together.
    """

    functions: Mapping[int, bytes]
    """Pickled, by number."""
    is_async: Sequence[bool]
    environment: Mapping[str, str]
    memory_limit: int
    """Bytes it may allocate beyond what it holds once the functions are loaded."""
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
    child: ChildProcess = field(init=False)
    mark: str = field(init=False)
    group: MemoryGroup | None = field(init=False)
    """Limits its memory, where this user may make a cgroup."""
    held: int = 0
    """Bytes it held once the functions were loaded."""
    too_much: str = ""
    """Why it was ended for its memory, as a failure."""
    over: bool = False
    """It was killed and waited for: its number may be another process's."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    oom_kills: int = field(init=False)
    """Processes that the kernel had ended for want of memory when this one was started."""

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.oom_kills = oom_kills()
        self.child = ChildProcess(
            ["-P", str(_SCRIPT)],
            # the same hash order in every worker: what walks through a set (sympy) scores the same
            {"PYTHONHASHSEED": "0", **self.environment, _MARK: self.mark},
        )
        try:
            limit_blocking(self.connection, PIPE_TIMEOUT)
        except OSError:
            self.child.kill_group()  # nobody else knows of it yet
            self.child.close()
            raise
        self.group = new_group(self.process.pid, self.mark)
        setup = {
            "sys_path": [path or os.getcwd() for path in sys.path],
            "functions": dict(self.functions),
            "is_async": list(self.is_async),
            "withheld": [name for name in os.environ if name not in self.environment],
            "memory_limit": self.memory_limit,
        }
        self.deadline = time.monotonic() + STARTUP_TIMEOUT
        self._send(setup)

    @property
    def connection(self) -> Connection:
        """The pipe to it."""
        return self.child.connection

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Itself."""
        return self.child.process

    @property
    def busy(self) -> bool:
        return bool(self.calls or self.coroutines)

    @property
    def limit_text(self) -> str:
        """What calls may take."""
        return f"{self.memory_limit >> 20} MiB"

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def assign(self, batch: list[Job]) -> None:
        """Send these jobs; the worker must be waiting for some."""
        message = []
        self.begun = False
        self.jobs = [job.key for job in batch]
        self.timeouts = {job.key: job.timeout for job in batch}
        for job in batch:
            todo = job.todo(self.functions)
            message.append((job.key, job.payload, [(index, job.timeout) for index in todo]))
            self.calls.extend((job.key, index) for index in todo if not self.is_async[index])
            self.coroutines.update((job.key, index) for index in todo if self.is_async[index])
        self._send(message)
        self._started(time.monotonic())

    def loads(self, index: int, error: str = "") -> None:
        """It loads this function now, or has failed to."""
        if self.ready or index not in self.functions:
            raise BadMessage("functions are loaded already, or it has no such function")
        self.loading, self.start_error = index, error

    def loaded(self) -> None:
        """It waits for work."""
        if self.ready:
            raise BadMessage("it was ready before")
        self.held = held_memory(self.process.pid)
        if self.group is not None:
            with suppress(OSError):
                self.group.limit(self.memory_limit)
        self.ready = True
        self.deadline = math.inf

    def check_memory(self) -> None:
        """End it if it and what it started hold too much; called in a thread of its own."""
        if not self.ready:
            return
        most = self.held + self.memory_limit
        if (held := held_memory(self.process.pid, more_than=most)) <= most:
            return
        with self.lock:
            if not self.over:
                self.too_much = (
                    f"out_of_memory: {(held - self.held) >> 20} MiB, shared memory and what it "
                    f"started included; the limit is {self.limit_text}"
                )
                self.child.kill_group()

    def began(self, stamp: float) -> None:
        """It took up the batch at this time of its clock, which is ours."""
        if self.begun or not self.busy:
            raise BadMessage("there was nothing to begin")
        self.begun = True
        self._started(stamp)

    def reported(self, key: int, index: int, stamp: float) -> None:
        """A call came to its end at this time.

        Raises:
            BadMessage: it is not one that was running.
        """
        call = (key, index)
        if self.begun and call in self.coroutines and not self.calls:
            self.coroutines.remove(call)
            if not self.busy:
                self.deadline = math.inf
        elif self.begun and self.calls and self.calls[0] == call:
            self.calls.popleft()
            self._started(stamp)
        else:
            raise BadMessage("a score out of turn")

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
        """Kill the process and its group; says what it had died of if it was dead."""
        with self.lock:
            # before `wait`: one not yet waited for keeps its number and exit code
            self.child.kill_group()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            self.over = True
        if self.group is not None:
            if self.group.struck:
                self.too_much = f"out_of_memory: its cgroup has a limit of {self.limit_text}"
            self.group.remove()
        self.child.close()
        end = how_it_ended(self.process.returncode)
        if self.process.returncode == -signal.SIGKILL and oom_kills() > self.oom_kills:
            end += ", while the kernel's out-of-memory killer was at work"
        return end

    def _started(self, stamp: float) -> None:
        """The next call began at this time."""
        if not 0 <= stamp <= time.monotonic():
            raise BadMessage("a time that is not now")
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


def limit_blocking(connection: Connection, seconds: float) -> None:
    """Let a read or a write that makes no progress for so long raise BlockingIOError."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def kill_strays(workers: Iterable[WorkerProcess]) -> None:
    """Kill what functions started in sessions of their own, which killing the group left alive.

    They are found by their environment, on Linux; one that cleared it is not.
    """
    marks = [f"{_MARK}={worker.mark}".encode() for worker in workers]
    for _ in range(10):  # one that was forking meanwhile has a child we have not seen
        folders = Path("/proc").glob("[0-9]*")
        strays = [int(folder.name) for folder in folders if _marked(folder, marks)]
        for pid in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not strays:
            return


def _marked(process: Path, marks: list[bytes]) -> bool:
    try:
        environment = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is another user's
        return False
    return any(mark in environment for mark in marks)


def oom_kills() -> int:
    """Processes that the kernel has ended for want of memory since the machine started."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return 0
