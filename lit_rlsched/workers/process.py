"""One worker, seen from the trainer."""

import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_rlsched.processes import ChildProcess, how_it_ended

STARTUP_TIMEOUT = 300.0
"""Seconds a worker may take to load what it calls."""
PIPE_TIMEOUT = 30.0
"""Seconds without progress before sending or receiving fails: a stopped worker reads nothing."""


class Worker:
    """A process for code of users or models: it dies with this one.

    Args:
        script: What it runs, such as `workers/scores.py`.
        setup: What `workers.child.Child.load` reads.
        environment: Environment variables that it sees.
    """

    def __init__(
        self, script: Path, setup: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self.ready = False
        """Whether everything is loaded."""
        self.loading: str = setup["loads"][0][0]
        """What is being loaded."""
        self.error = ""
        """Why it could not be loaded."""
        self.deadline = time.monotonic() + STARTUP_TIMEOUT
        self._oom_kills = oom_kills()
        self._child = ChildProcess(
            ["-P", str(script)],
            # the same hash seed in every worker: scores may depend on the order of a set (sympy)
            {"PYTHONHASHSEED": "0", **environment},
        )
        self.process, self.connection = self._child.process, self._child.connection
        try:
            self._limit_blocking()
        except OSError:
            self.kill()
            raise
        self.send(
            {
                **setup,
                "sys_path": [path or os.getcwd() for path in sys.path],
                "withheld": [name for name in os.environ if name not in environment],
            }
        )

    def _limit_blocking(self) -> None:
        """Let a read or write that makes no progress raise BlockingIOError."""
        limit = struct.pack("ll", int(PIPE_TIMEOUT), int(PIPE_TIMEOUT % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @property
    def due(self) -> float:
        """When somebody must look at it."""
        return self.deadline

    @property
    def is_replaced(self) -> bool:
        """Whether another one takes its place when it ends."""
        return True

    def send(self, message: Any) -> None:
        with suppress(OSError):  # it died meanwhile, which is noticed on the next read
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def started(self) -> None:
        self.ready, self.deadline = True, math.inf

    def kill(self) -> str:
        """Kill the process and its group; return how the process ended."""
        # before `wait`: until then it keeps its process id and exit code
        self._child.kill_group()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self._child.close()
        end = how_it_ended(self.process.returncode)
        if self.process.returncode == -signal.SIGKILL and oom_kills() > self._oom_kills:
            end += ", while the kernel's out-of-memory killer was at work"
        return end


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
