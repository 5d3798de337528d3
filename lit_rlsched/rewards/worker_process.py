"""One reward worker, seen from the trainer."""

import math
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lit_rlsched.processes import ChildProcess, how_it_ended
from lit_rlsched.rewards.jobs import BadMessage, Job, Result, parse_message

_ROUGH = re.compile(r"(RssAnon|RssShmem|VmSwap):\s+(\d+) kB")
_EXACT = re.compile(r"^(Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB", re.MULTILINE)


def held_memory(pid: int, more_than: float = 0) -> int:
    """Return the bytes that a process and its descendants hold.

    This counts private memory, in RAM and in swap, and shared memory: the larger of the mapped
    memory and of that in open memfds and open files of `/dev/shm`, as mostly these are the same.
    """
    if sys.platform != "linux":
        return 0
    processes = list(_with_descendants(pid))
    files = {name: size for process in processes for name, size in _shared_files(process)}
    held = _sum(processes, "status", _ROUGH, sum(files.values()))
    if held > more_than:
        held = _sum(processes, "smaps_rollup", _EXACT, sum(files.values())) or held
    return held


def _sum(processes: Iterable[int], file: str, pattern: re.Pattern[str], in_files: int) -> int:
    private = mapped = 0
    for process in processes:
        with suppress(OSError):  # it has ended
            # a process may give itself a name that is not text
            text = Path(f"/proc/{process}/{file}").read_text(errors="replace")
            for name, size in pattern.findall(text):
                if name.endswith("Shmem"):
                    mapped += int(size) * 1024
                else:
                    private += int(size) * 1024
    return private + max(mapped, in_files)


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in children.split():
                yield from _with_descendants(int(child))


def _shared_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the identity and the bytes of each file in memory that a process holds open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                path = f"/proc/{pid}/fd/{descriptor}"
                # check the name first: `stat` may block on a network file system
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    file = os.stat(path)
                    yield (file.st_dev, file.st_ino), file.st_blocks * 512


def warn_of_no_limit(limit: int | None) -> None:
    """Warn that a memory limit has no effect on this platform."""
    if limit is not None and sys.platform != "linux":
        warnings.warn(
            f"`reward_memory_limit={limit >> 20}MiB` has no effect: memory of reward workers is "
            f"limited on Linux only, and this is `{sys.platform}`. A function may take all memory "
            "of the machine.",
            stacklevel=3,
        )


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container this runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: "max"
            sizes.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(sizes)


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended since boot."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return 0


STARTUP_TIMEOUT = 300.0
"""Seconds a worker may take to import the reward functions."""
ASYNC_GRACE = 1.0
"""Seconds an event loop gets to time its coroutines out before the worker is killed."""
PIPE_TIMEOUT = 30.0
"""Seconds without progress before sending or receiving fails: a stopped worker reads nothing."""
MAX_MESSAGE = 64 << 20
"""Maximum number of bytes in a worker's message."""
MEMORY_INTERVAL = 0.1
"""Seconds between two checks of a worker's memory; in between, it may exceed the limit."""

_MARK = "LIT_RLSCHED_REWARD_WORKER"
"""Environment variable that tells which worker a process comes from."""
_SCRIPT = Path(__file__).with_name("reward_worker.py")


class GuardedProcess:
    """A process for code of users or models: it dies with this one, and if it takes too much."""

    def __init__(
        self,
        script: Path,
        setup: Mapping[str, Any],
        environment: Mapping[str, str],
        memory_limit: int,
    ) -> None:
        self.too_much = ""
        """Why it was killed for its memory, as a failure."""
        self.mark = uuid.uuid4().hex
        self._memory_limit = memory_limit
        self._kill_lock = threading.Lock()
        self._over = threading.Event()
        """Set once the process was waited for: its id may then belong to another process."""
        self._oom_kills = oom_kills()
        self._child = ChildProcess(
            ["-P", str(script)],
            # the same hash seed in every worker: scores may depend on the order of a set (sympy)
            {"PYTHONHASHSEED": "0", **environment, _MARK: self.mark},
        )
        self.process, self.connection = self._child.process, self._child.connection
        try:
            limit_blocking(self.connection, PIPE_TIMEOUT)
        except OSError:
            self.kill()
            raise
        self.send(
            {
                **setup,
                "memory_limit": memory_limit,
                "sys_path": [path or os.getcwd() for path in sys.path],
                "withheld": [name for name in os.environ if name not in environment],
            }
        )

    def send(self, message: Any) -> None:
        with suppress(OSError):  # it died meanwhile, which is noticed on the next read
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def kill(self) -> str:
        """Kill the process and its group; return how the process ended."""
        with self._kill_lock:
            # before `wait`: until then it keeps its process id and exit code
            self._child.kill_group()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            self._over.set()
        self._child.close()
        end = how_it_ended(self.process.returncode)
        if self.process.returncode == -signal.SIGKILL and oom_kills() > self._oom_kills:
            end += ", while the kernel's out-of-memory killer was at work"
        return end

    def watch_memory(self) -> None:
        """Start a thread that kills the process and all it started if they hold too much.

        The kernel's limit on a process does not count shared memory, and holds for each process
        that a function starts separately. A thread, as the trainer is busy between decode steps.
        """
        if sys.platform == "linux":
            loaded = held_memory(self.process.pid)
            threading.Thread(
                target=self._watch_memory, args=(loaded,), name="worker-memory", daemon=True
            ).start()

    def _watch_memory(self, loaded: int) -> None:
        limit = loaded + self._memory_limit
        while not self._over.wait(MEMORY_INTERVAL):
            held = held_memory(self.process.pid, more_than=limit)
            if held > limit:
                with self._kill_lock:
                    if not self._over.is_set():
                        self.too_much = (
                            f"out_of_memory: {(held - loaded) >> 20} MiB, shared memory and child "
                            f"processes included; the limit is {self._memory_limit >> 20} MiB"
                        )
                        self._child.kill_group()
                return


class WorkerProcess(GuardedProcess):
    """Process of `reward_worker.py`.

    It runs the sync calls of a batch in order, so the first one without a score is the running one;
    then it runs all coroutines of the batch concurrently.
    """

    def __init__(self, setup: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.ready = False
        """Whether the functions are loaded."""
        self.loading = 0
        """Number of the function that is being loaded."""
        self.start_error = ""
        self.jobs: dict[int, Job] = {}
        """The current batch, by key."""
        self.calls: deque[tuple[int, int]] = deque()
        """Sync calls without a score: key of the job and number of the function."""
        self.coroutines: set[tuple[int, int]] = set()
        self.begun = False
        """Whether it works on the batch. Before that, no call is to blame for its end."""
        self.limit = STARTUP_TIMEOUT
        self.deadline = time.monotonic() + STARTUP_TIMEOUT
        self._functions = setup["functions"]
        self._is_async = setup["is_async"]
        super().__init__(_SCRIPT, setup, environment, setup["memory_limit"])

    @property
    def busy(self) -> bool:
        return bool(self.calls or self.coroutines)

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def assign(self, batch: list[Job]) -> None:
        """Send jobs to a worker that is not busy."""
        message = []
        self.begun = False
        self.jobs = {job.key: job for job in batch}
        for job in batch:
            todo = job.todo(self._functions)
            message.append((job.key, job.payload, [(index, job.timeout) for index in todo]))
            self.calls.extend((job.key, index) for index in todo if not self._is_async[index])
            self.coroutines.update((job.key, index) for index in todo if self._is_async[index])
        self.send(message)
        self._set_deadline(time.monotonic())

    def receive(self) -> tuple[Job, int, Result] | None:
        """Read one message; if it is a score, return the job, the function and the result."""
        kind, fields = parse_message(self.connection.recv_bytes(MAX_MESSAGE))
        if kind == "score":
            key, index, stamp, *result = fields
            try:
                outcome = Result.received(*result)
            except TypeError:
                raise BadMessage("a score with a wrong number of fields") from None
            self._end_call((key, index), stamp)
            return self.jobs[key], index, outcome
        if kind == "begun":
            if self.begun or not self.busy:
                raise BadMessage("`begun` without a new batch")
            self.begun = True
            self._set_deadline(fields[0])
        elif self.ready or not {*fields[:1]} <= self._functions.keys():
            raise BadMessage(f"`{kind}` after it was ready, or of an unknown function")
        elif kind == "ready":
            self.watch_memory()
            self.ready = True
            self.deadline = math.inf
        else:
            self.loading, self.start_error = fields[0], "".join(fields[1:])
        return None

    def at_fault(self) -> list[tuple[int, int]]:
        """Return the calls that may have been running, if they belong to one completion."""
        if not self.begun:
            return []
        if self.calls:
            return [self.calls[0]]
        if len({key for key, _ in self.coroutines}) == 1:
            return sorted(self.coroutines)
        return []

    def _end_call(self, call: tuple[int, int], stamp: float) -> None:
        if self.begun and call in self.coroutines and not self.calls:
            self.coroutines.remove(call)
            if not self.busy:
                self.deadline = math.inf
        elif self.begun and self.calls and self.calls[0] == call:
            self.calls.popleft()
            self._set_deadline(stamp)
        else:
            raise BadMessage("a score out of turn")

    def _set_deadline(self, start: float) -> None:
        """Set the deadline of the next call, which began at `start` on the common clock."""
        if not 0 <= start <= time.monotonic():
            raise BadMessage("an impossible time")
        if self.calls:
            self.limit = self.jobs[self.calls[0][0]].timeout
        elif self.coroutines:
            self.limit = max(self.jobs[key].timeout for key, _ in self.coroutines) + ASYNC_GRACE
        else:
            self.limit = math.inf
        self.deadline = start + self.limit


def limit_blocking(connection: Connection, seconds: float) -> None:
    """Let a read or write that makes no progress for so long raise BlockingIOError."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def kill_strays(workers: Iterable[GuardedProcess]) -> None:
    """Kill processes that functions started in sessions of their own, outside the worker's group.

    They are found by their environment, on Linux; one that cleared its environment is not found.
    """
    marks = [f"{_MARK}={worker.mark}".encode() for worker in workers]
    for _ in range(10):  # again, as one that was forking may have left a new child
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
