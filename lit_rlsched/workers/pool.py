"""Workers, seen from the trainer, and pools of them: started, heard, and replaced."""

import json
import logging
import math
import os
import pickle
import selectors
import socket
import struct
import subprocess
import sys
import time
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import cloudpickle

from lit_rlsched.processes import ChildProcess, how_it_ended, require_posix
from lit_rlsched.settings import RunFailed, UsageError

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT = 300.0
"""Seconds a worker may take to load what it calls."""
PIPE_TIMEOUT = 30.0
"""Seconds without progress before sending or receiving fails: a stopped worker reads nothing."""
MAX_FAILED_STARTS = 3
"""Number of workers in a row that may fail to start before the run stops."""
MAX_DEATHS = 20
"""Number of workers in a row that may die without an answer, and without a call to blame."""
MAX_MESSAGE = 64 << 20
"""Maximum number of bytes in a worker's message."""
FAILURE_KINDS = {
    "raised": "raised",
    "timeout": "timeouts",
    "crashed": "crashes",
    "out_of_memory": "out_of_memory",
    "bad_return": "bad_returns",
    "no_answer": "no_answers",
    "unparsed": "unparsed",
}
"""First word of a failure -> last part of its metric key."""
MESSAGES: dict[str, tuple[list[type], int]] = {
    "loading": ([str], 0),
    "unloadable": ([str], 0),
    "ready": ([], 0),
    "begun": ([float], 0),
    "score": ([int, int, float], 5),
    "answer": ([int], 3),
    "pong": ([], 0),
}
"""Kind of a worker's message -> types of its first fields, and how many follow."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class BadMessage(Exception):
    """A worker sent something that it never sends by itself."""


class Result(NamedTuple):
    """Outcome of one call of one reward function."""

    seconds: float | None
    score: float | None
    failure: str | None
    extra: dict[str, Any]
    metrics: dict[str, list[float]]

    @classmethod
    def received(cls, seconds: Any, score: Any, failure: Any, extra: Any, metrics: Any) -> "Result":
        """Check the types of the fields that a worker sent."""
        if (  # one expression that compares types, as this is done for each score
            (score is None or (type(score) is float and math.isfinite(score)))
            and (seconds is None or (type(seconds) is float and math.isfinite(seconds)))
            and (
                failure is None
                or (type(failure) is str and failure.partition(":")[0] in FAILURE_KINDS)
            )
            and type(extra) is type(metrics) is dict
            and all(type(x) is list and all(type(y) is float for y in x) for x in metrics.values())
        ):
            return cls(seconds, score, failure, extra, metrics)
        raise BadMessage(f"a result with wrong types: {score!r:.80}")


def parse_message(data: bytes) -> tuple[str, list[Any]]:
    """Return the kind and the fields of a worker's message."""
    try:
        message = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise BadMessage(f"invalid JSON: {data!r:.80}") from None
    if type(message) is not list or not message:
        raise BadMessage(f"JSON that is not a list: {message!r:.80}")
    kind, *fields = message
    types, more = MESSAGES.get(kind, ([], -1)) if type(kind) is str else ([], -1)
    if len(fields) != len(types) + more or [*map(type, fields[: len(types)])] != types:
        raise BadMessage(f"an unknown message: {message!r:.80}")
    return kind, fields


def packed_row(
    prompt: Any,
    completion: Any,
    completion_ids: Sequence[int],
    columns: Mapping[str, Any],
    trainer_state: Any,
) -> bytes:
    """Return what `workers.child.Call` makes the arguments of a function from."""
    row = {name: value for name, value in columns.items() if name not in _NOT_COLUMNS}
    row |= {"prompts": prompt, "completions": completion, "trainer_state": trainer_state}
    row["completion_ids"] = array("q", completion_ids)
    return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)


class Worker:
    """A process for code of users: it runs a script of `workers` and dies with this process."""

    def __init__(self, script: Path, pool: "Pool[Any]") -> None:
        self.pool = pool
        self.ready = False
        """Whether everything is loaded."""
        self.loading: str = pool.setup["loads"][0][0]
        """What is being loaded."""
        self.error = ""
        """Why it could not be loaded."""
        self.deadline = time.monotonic() + STARTUP_TIMEOUT
        self._child = ChildProcess(
            ["-P", str(script)],
            # the same hash seed in every worker: scores may depend on the order of a set (sympy)
            {"PYTHONHASHSEED": "0", **pool.environment},
        )
        self.process, self.connection = self._child.process, self._child.connection
        # a read or write that makes no progress raises BlockingIOError
        limit = struct.pack("ll", int(PIPE_TIMEOUT), int(PIPE_TIMEOUT % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.send(
            {
                **pool.setup,
                "sys_path": [path or os.getcwd() for path in sys.path],
                "withheld": [name for name in os.environ if name not in pool.environment],
            }
        )

    @property
    def due(self) -> float:
        """When somebody must look at it."""
        return self.deadline

    def send(self, message: Any) -> None:
        with suppress(OSError):  # it died meanwhile, which is noticed on the next read
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def kill(self) -> str:
        """Kill the process and its group; return how the process ended."""
        # before `wait`: until then it keeps its process id and exit code
        self._child.kill_group()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self._child.close()
        return how_it_ended(self.process.returncode)


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class Pool(Generic[W]):
    """Workers that load the same, in the same environment, and the work that waits for them."""

    setup: Mapping[str, Any]
    environment: Mapping[str, str]
    size: int
    queue: deque[Any] = field(default_factory=deque)
    workers: list[W] = field(default_factory=list)
    started: bool = False
    """Whether all workers have been ready at some time."""
    failed_starts: list[str] = field(default_factory=list)
    """Why workers failed to start, since one was ready."""
    deaths: list[str] = field(default_factory=list)
    """How workers ended without a call to blame, since something was answered."""


class Workers(ABC, Generic[W]):
    """Runs code of users in guarded processes, so that it cannot harm the run.

    Nothing happens between calls: `serve` reads answers, sends work and kills overdue workers.
    """

    kind: str
    """What they are, in messages: `reward` or `environment`."""
    loads: str
    """What they load, in messages."""
    script: Path
    make: type[W]

    def __init__(self) -> None:
        self._pools: list[Pool[W]] = []
        self._came: list[Any] = []
        """What `poll` returns next."""
        self._selector = selectors.DefaultSelector()
        self._kill_at_exit = weakref.finalize(self, _kill_all, self._pools, os.getpid())

    @abstractmethod
    def _feed(self) -> None:
        """Send work to workers that can take it."""

    @abstractmethod
    def _received(self, worker: W, kind: str, fields: list[Any]) -> None:
        """Use a message of a worker that is ready; raises `BadMessage`."""

    @abstractmethod
    def _overdue(self, worker: W) -> None:
        """Look at a worker that is due."""

    @abstractmethod
    def _settle(self, worker: W, to_blame: Mapping[Any, str] | None, why: str) -> bool:
        """Fail the calls `to_blame` for a worker's end, and save the rest; were there any to blame?

        None: those that may have been running, because of `why`.
        """

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of answers that `poll` has not returned yet."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` has something to return.

        Args:
            timeout: Maximum number of seconds to wait.

        Returns:
            False if nothing has come in time, or nothing is pending.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.pending and not self._came and (left := end - time.monotonic()) > 0:
            self.serve(min(left, 1.0))
        return bool(self._came)

    @property
    def _workers(self) -> list[W]:
        return [worker for pool in self._pools for worker in pool.workers]

    def _begin(self, *pools: Pool[W]) -> None:
        """Launch the workers and wait until all have loaded everything."""
        require_posix(f"The {self.kind} workers")
        self._pools += pools
        try:
            for pool in pools:
                for _ in range(pool.size):
                    self._launch(pool)
            while not all(worker.ready for worker in self._workers):
                self.serve(1.0)
        except BaseException:
            self._end_all()
            raise

    def _launch(self, pool: Pool[W]) -> None:
        worker = self.make(self.script, pool)
        pool.workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def serve(self, seconds: float = 0.0) -> None:
        """Send work, receive answers for so long at most, and deal with overdue workers."""
        self._feed()
        block = min([seconds, *(worker.due - time.monotonic() for worker in self._workers)])
        while ready := self._selector.select(max(0.0, block)):
            block = 0.0
            for key, _ in ready:
                self._receive(key.data)
        for worker in self._workers:
            if worker.due > time.monotonic():
                continue
            if worker.ready:
                self._overdue(worker)
            else:
                self._replace(worker, f"not loaded within {STARTUP_TIMEOUT:g} s")
        self._feed()

    def _receive(self, worker: W) -> None:
        try:
            kind, fields = parse_message(worker.connection.recv_bytes(MAX_MESSAGE))
            if worker.ready:
                self._received(worker, kind, fields)
            elif kind == "loading":
                (worker.loading,) = fields
            elif kind == "unloadable":
                (worker.error,) = fields
            elif kind == "ready":
                worker.ready, worker.deadline = True, math.inf
                worker.pool.failed_starts.clear()
                worker.pool.started |= all(worker.ready for worker in worker.pool.workers)
            else:
                raise BadMessage(f"`{kind}` before it was ready")
        except (EOFError, OSError):
            self._replace(worker)
        except BadMessage as error:
            self._replace(worker, f"crashed: the worker sent {error}")

    def _replace(
        self, worker: W, why: str | None = None, to_blame: Mapping[Any, str] | None = None
    ) -> None:
        """Kill a worker and launch another one."""
        pool = worker.pool
        self._selector.unregister(worker.connection)
        pool.workers.remove(worker)
        death = worker.kill()
        if not worker.ready:
            self._start_failed(worker, why, death)
        why = why or f"crashed: the worker {death}"
        if not self._settle(worker, to_blame, why) and worker.ready:
            logger.warning(
                "a %s worker %s; another one does what it has not done", self.kind, death
            )
            pool.deaths.append(death)
        if len(pool.deaths) >= MAX_DEATHS:
            raise RunFailed(
                f"{len(pool.deaths)} {self.kind} workers in a row ended before they had answered "
                f"anything: {_counted(pool.deaths)}. No call is known to be the cause: look for "
                "what ends processes on this machine (the out-of-memory killer, limits of the "
                "container or the job)."
            )
        self._launch(pool)

    def _start_failed(self, worker: W, why: str | None, death: str) -> None:
        """Note why a worker did not start; end the run if the next one would not either."""
        pool = worker.pool
        reason = worker.error or why or f"the worker {death}"
        pool.failed_starts.append(reason)
        logger.warning("%s failed to load in a worker: %s", worker.loading, reason)
        # an error while loading would come again; a process that was killed may start next time
        raised = bool(worker.error or why)
        if not (raised and not pool.started) and len(pool.failed_starts) < MAX_FAILED_STARTS:
            return
        hint = (
            f"{self.loads} run in separate processes: they, and all they use, must be importable "
            "there, and they see few environment variables (`reward_env_vars`)."
            if raised
            else "Nothing was raised there: the process was ended. SIGKILL comes from the "
            "out-of-memory killer, from a limit of the container or the job, or from a person; an "
            "exit code or SIGSEGV comes from code that is imported or that `warm_up` calls."
        )
        article = "an" if self.kind[0] in "aeiou" else "a"
        raise RunFailed(
            f"{worker.loading} cannot be loaded in {article} {self.kind} worker: "
            f"{_counted(pool.failed_starts)}. {hint}"
        )

    def _end_all(self) -> None:
        for worker in self._workers:
            self._selector.unregister(worker.connection)
        _kill_all(self._pools, os.getpid())


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container this runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: "max"
            sizes.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(sizes)


def pickled(what: str, given: Any) -> bytes:
    """Return something for a worker; refuse what cannot be sent there."""
    try:
        return cloudpickle.dumps(given)
    except Exception as error:
        raise UsageError(
            f"{what} cannot be sent to a worker: {type(error).__name__}: {error}. Define it at the "
            "top level of a module, or open what it holds (locks, clients, models) inside it."
        ) from error


def _counted(reasons: Sequence[str]) -> str:
    counted = Counter(reasons).items()
    return "; ".join(f"{reason} ({n} times)" if n > 1 else reason for reason, n in counted)


def _kill_all(pools: list[Pool[Any]], owner: int) -> None:
    """Kill all workers. Not a method, as it runs when their owner is garbage-collected."""
    if os.getpid() == owner:  # a forked child leaves its parent's workers alone
        for worker in (worker for pool in pools for worker in pool.workers):
            worker.kill()
        pools.clear()
