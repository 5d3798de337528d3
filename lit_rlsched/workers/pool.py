"""Pools of workers: started, heard, and replaced when they end."""

import logging
import os
import selectors
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle

from lit_rlsched.processes import require_posix
from lit_rlsched.settings import RunFailed, UsageError
from lit_rlsched.workers.messages import BadMessage, parse_message
from lit_rlsched.workers.process import STARTUP_TIMEOUT, Worker

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Number of workers in a row that may fail to start before the run stops."""
MAX_DEATHS = 20
"""Number of workers in a row that may die without an answer, and without a call to blame."""
MAX_MESSAGE = 64 << 20
"""Maximum number of bytes in a worker's message."""
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

    Nothing happens between calls: `turn` reads answers, sends work and kills overdue workers.
    """

    kind: str
    """What they are, in messages: `reward` or `environment`."""
    loads: str
    """What they load, in messages."""
    script: Path
    make: type[W]

    def __init__(self) -> None:
        self._pools: list[Pool[W]] = []
        self._selector = selectors.DefaultSelector()
        self._kill_at_exit = weakref.finalize(self, _kill_all, self._pools, os.getpid())

    @abstractmethod
    def _feed(self) -> None:
        """Send work to workers that can take it."""

    @abstractmethod
    def _received(self, pool: Pool[W], worker: W, kind: str, fields: list[Any]) -> None:
        """Use a message of a worker that is ready; raises `BadMessage`."""

    @abstractmethod
    def _overdue(self, pool: Pool[W], worker: W) -> None:
        """Look at a worker that is due."""

    @abstractmethod
    def _settle(
        self, pool: Pool[W], worker: W, to_blame: Mapping[Any, str] | None, why: str
    ) -> bool:
        """Fail the calls `to_blame` for a worker's end, and save the rest; were there any to blame?

        None: those that may have been running, because of `why`.
        """

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
                self.turn(1.0)
        except BaseException:
            self._end_all()
            raise

    def _launch(self, pool: Pool[W]) -> W:
        worker = self.make(self.script, pool.setup, pool.environment)
        pool.workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, (pool, worker))
        return worker

    def turn(self, seconds: float = 0.0) -> None:
        """Send work, receive answers and deal with overdue workers, but return nothing yet.

        Args:
            seconds: Maximum time to wait for an answer.
        """
        self._feed()
        block = min([seconds, *(worker.due - time.monotonic() for worker in self._workers)])
        while ready := self._selector.select(max(0.0, block)):
            block = 0.0
            for key, _ in ready:
                self._receive(*key.data)
        for pool in self._pools:
            for worker in [*pool.workers]:
                if worker.due > time.monotonic():
                    continue
                if worker.ready:
                    self._overdue(pool, worker)
                else:
                    self._replace(pool, worker, f"not loaded within {STARTUP_TIMEOUT:g} s")
        self._feed()

    def _receive(self, pool: Pool[W], worker: W) -> None:
        try:
            kind, fields = parse_message(worker.connection.recv_bytes(MAX_MESSAGE))
            if worker.ready:
                self._received(pool, worker, kind, fields)
            elif kind == "loading":
                (worker.loading,) = fields
            elif kind == "unloadable":
                (worker.error,) = fields
            elif kind == "ready":
                worker.started()
                pool.failed_starts.clear()
                pool.started = pool.started or all(worker.ready for worker in pool.workers)
            else:
                raise BadMessage(f"`{kind}` before it was ready")
        except (EOFError, OSError):
            self._replace(pool, worker)
        except BadMessage as error:
            self._replace(pool, worker, f"crashed: the worker sent {error}")

    def _end(self, pool: Pool[W], worker: W) -> str:
        """Kill a worker, and return how it ended."""
        self._selector.unregister(worker.connection)
        pool.workers.remove(worker)
        return worker.kill()

    def _replace(
        self,
        pool: Pool[W],
        worker: W,
        why: str | None = None,
        to_blame: Mapping[Any, str] | None = None,
    ) -> None:
        """Kill a worker and launch another one."""
        death = self._end(pool, worker)
        if not worker.ready:
            self._start_failed(pool, worker, why, death)
        why = why or f"crashed: the worker {death}"
        if not self._settle(pool, worker, to_blame, why) and worker.ready:
            self._died_idle(pool, death)
        if worker.is_replaced:
            self._launch(pool)

    def _start_failed(self, pool: Pool[W], worker: W, why: str | None, death: str) -> None:
        reason = worker.error or why or f"the worker {death}"
        pool.failed_starts.append(reason)
        logger.warning("%s failed to load in a worker: %s", worker.loading, reason)
        # an error while loading would come again; a process that was killed may start next time
        raised = bool(worker.error or why)
        if not (raised and not pool.started) and len(pool.failed_starts) < MAX_FAILED_STARTS:
            return
        if worker.error:
            hint = (
                f"{self.loads} run in separate processes: they, and all they use, must be "
                "importable there, and they see few environment variables (`reward_env_vars`)."
            )
        elif why:
            hint = "Loading is importing it, unpickling it and calling its `warm_up`."
        else:
            hint = (
                "Nothing was raised there: the process was ended. SIGKILL comes from the "
                "out-of-memory killer, from a limit of the container or the job, or from a person; "
                "an exit code or SIGSEGV comes from code that is imported or that `warm_up` calls."
            )
        article = "an" if self.kind[0] in "aeiou" else "a"
        raise RunFailed(
            f"{worker.loading} cannot be loaded in {article} {self.kind} worker: "
            f"{_counted(pool.failed_starts)}. {hint}"
        )

    def _died_idle(self, pool: Pool[W], death: str) -> None:
        logger.warning("a %s worker %s; another one does what it has not done", self.kind, death)
        pool.deaths.append(death)
        if len(pool.deaths) >= MAX_DEATHS:
            raise RunFailed(
                f"{len(pool.deaths)} {self.kind} workers in a row ended before they had answered "
                f"anything: {_counted(pool.deaths)}. No call is known to be the cause: look for "
                "what ends processes on this machine (the out-of-memory killer, limits of the "
                "container or the job)."
            )

    def _end_all(self) -> None:
        for worker in self._workers:
            self._selector.unregister(worker.connection)
        _kill_all(self._pools, os.getpid())


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
