"""Sessions of environments in worker processes, with time-outs and limits, as rewards have them."""

import math
import os
import selectors
import time
import weakref
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from lit_rlsched.environments.answers import Answer, checked, message_of
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.processes import hide_environment, require_posix, worker_environment
from lit_rlsched.rewards.jobs import BadMessage, Result, packed_row
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.rewards.worker_process import (
    MAX_MESSAGE,
    STARTUP_TIMEOUT,
    GuardedProcess,
    kill_strays,
    machine_memory,
)
from lit_rlsched.settings import RunFailed, UsageError

_SCRIPT = Path(__file__).with_name("session_worker.py")
MAX_OPENING = 32
"""Sessions that a worker opens at the same time: the others' time does not begin yet."""
GRACE = 1.0
"""Seconds that a worker has to stop a late coroutine itself, and then to say that it listens."""
MAX_DEATHS = 20
"""Workers in a row that may die without an answer, and without a call to blame."""


@dataclass(slots=True, eq=False)
class _Session:
    key: Hashable
    number: int
    """Its name in the worker."""
    opening: tuple[Any, ...]
    alone: bool = False
    worker: "_Worker | None" = None
    waits_for: str | None = None
    """The answer that it waits for."""
    timeout: float = 0.0
    """Seconds that it may take."""
    deadline: float = math.inf

    @property
    def late(self) -> str:
        """What to say of an answer that did not come in time."""
        return f"timeout: no answer within {self.timeout:g} s"


@dataclass(slots=True, eq=False)
class _Worker:
    process: GuardedProcess
    deadline: float
    """When it must be ready."""
    alone: bool = False
    """Whether it holds one session at a time."""
    ready: bool = False
    worn: bool = False
    """Whether a reward function hangs in one of its threads: it ends with the sessions it has."""
    loading: str = ""
    error: str = ""
    asked: float | None = None
    """When it was asked whether it still listens, because an answer is late."""
    sessions: dict[int, _Session] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Whether it can open another session now."""
        if self.worn or self.alone:
            return self.ready and not self.worn and not self.sessions
        opening = sum(session.waits_for == "open" for session in self.sessions.values())
        return self.ready and opening < MAX_OPENING

    @property
    def due(self) -> float:
        """When somebody must look at it."""
        if self.asked is not None:
            return self.asked + GRACE
        return min([self.deadline, *(session.deadline for session in self.sessions.values())])


class EnvironmentScheduler:
    """Opens sessions, calls tools and collects the answers, without waiting for any of them.

    A session stays in its worker. A call that takes too long, crashes or takes too much memory
    costs its own session: the worker is killed, and its other sessions are `lost`, to be opened
    again. If it is not clear whose call it was, each of them is opened again alone in a worker.
    A reward function that takes too long has failed, and the other sessions go on: its thread
    cannot be ended, so the worker gets no new sessions, another one does, and it ends with its own.
    """

    def __init__(
        self,
        environments: Environments,
        rewards: RewardScheduler | None = None,
        *,
        workers: int = 1,
        timeout: float = 60.0,
        max_sessions: int | None = None,
        memory_limit: int | None = None,
        env_vars: Sequence[str] = (),
    ) -> None:
        self.environments = environments
        self._rewards = rewards
        self.timeout = timeout
        self._num_workers = workers
        self._most = math.inf if max_sessions is None else max_sessions
        self._memory_limit = memory_limit
        self._env_vars = env_vars
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._sessions: dict[Hashable, _Session] = {}
        self._queue: deque[_Session] = deque()
        self._answers: list[Answer] = []
        self._suspects: set[Hashable] = set()
        """Keys of sessions that may have ended a worker."""
        self._started = False
        """Whether some worker has been ready."""
        self._numbers = 0
        self._deaths = 0
        self._kill_at_exit = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    @property
    def pending(self) -> int:
        """Number of answers that `poll` has not returned yet."""
        waiting = sum(s.waits_for is not None for s in self._sessions.values())
        return waiting + len(self._answers)

    @property
    def open_sessions(self) -> int:
        """Number of sessions that have a worker."""
        return sum(len(worker.sessions) for worker in self._workers)

    def start(self) -> None:
        """Launch the workers and wait until they have imported tools and classes."""
        if self._workers:
            return
        require_posix("The environment workers")
        self._setup = {
            "pickled": self._pickled(),
            "methods": {n: e.methods for n, e in self.environments.by_name.items()},
            "with_state": {n for n, e in self.environments.by_name.items() if e.has_state},
            "timeout": self.timeout,
            "offered": self._rewards.offered if self._rewards else (),
        }
        hide_environment()
        for _ in range(self._num_workers):
            self._launch()
        while not all(worker.ready for worker in self._workers):
            self._turn(1.0)

    def _pickled(self) -> list[tuple[str, Any, bytes]]:
        tools = [("tool", name, tool) for name, tool in self.environments.tools.items()]
        kinds = self.environments.by_name.items()
        made: list[Any] = [("environment", n, e.factory) for n, e in kinds if e.factory is not None]
        pickled: list[tuple[str, Any, bytes]] = []
        if (rewards := self._rewards) is not None:
            indices = rewards.of_environments
            pickled += [("reward function", i, rewards.pickled(i)) for i in indices]
        for what, name, one in (*tools, *made):
            try:
                pickled.append((what, name, cloudpickle.dumps(one)))
            except Exception as error:
                raise UsageError(
                    f"The {what} `{name or getattr(one, '__name__', one)}` cannot be sent to a "
                    f"worker: {type(error).__name__}: {error}. Define it at the top level of a "
                    "module, or open what it holds (locks, clients, models) inside it."
                ) from error
        return pickled

    def _launch(self, alone: bool = False) -> _Worker:
        limit = self._memory_limit or machine_memory() // 2 // self._num_workers
        environment = worker_environment(self._env_vars)
        process = GuardedProcess(_SCRIPT, self._setup, environment, limit)
        worker = _Worker(process, time.monotonic() + STARTUP_TIMEOUT, alone)
        self._workers.append(worker)
        self._selector.register(worker.process.connection, selectors.EVENT_READ, worker)
        return worker

    def open(
        self, key: Hashable, name: str | None, columns: Mapping[str, Any], state: str = ""
    ) -> None:
        """Begin a session; the answer is the observation of `reset`, or None."""
        assert key not in self._sessions, f"{key} is open"
        self.start()
        self._numbers += 1
        opening = (name, dict(columns), state)
        session = _Session(key, self._numbers, opening, key in self._suspects, waits_for="open")
        self._sessions[key] = session
        self._queue.append(session)
        self._place()

    def call(self, key: Hashable, calls: Sequence[tuple[str, Any]]) -> None:
        """Call tools; the answer has name, reply and failure of each call."""
        self._ask(self._sessions[key], "call", list(calls))

    @property
    def scores(self) -> bool:
        """Whether reward functions are called with environments."""
        return self._rewards is not None and bool(self._rewards.of_environments)

    def needs_another_to_end(self, key: Hashable) -> bool:
        """Whether a session, which is opened alone in a worker, waits for one that is there."""
        session = self._sessions.get(key)
        return session is not None and session.alone and session.worker is None

    def reward(self, key: Hashable, row: Mapping[str, Any], timeout: float | None = None) -> None:
        """Call the reward functions; the answer has the `Result` of each, by its number."""
        assert self._rewards is not None
        timeout = timeout or self._rewards.timeout
        together = timeout * len(self._rewards.of_environments)
        given = packed_row(**row), timeout
        self._ask(self._sessions[key], "reward", *given, seconds=together)

    def close(self, key: Hashable) -> None:
        """End a session, whatever it waits for."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._answers = [answer for answer in self._answers if answer.key != key]
        if session.worker is None:
            self._queue.remove(session)
        elif session.waits_for is not None:  # it ends with its answer, or when its time is up
            session.key = None
        else:
            self._leave(session)
            session.worker.process.send(("close", session.number))
            self._suspects.discard(key)
        self._place()

    def _leave(self, session: _Session) -> None:
        assert session.worker is not None
        del session.worker.sessions[session.number]
        if session.worker.worn and not session.worker.sessions:
            self._end(session.worker)

    def _ask(self, session: _Session, what: str, *given: Any, seconds: float | None = None) -> None:
        assert session.worker is not None and session.waits_for is None
        session.timeout = seconds or self.timeout
        session.waits_for, session.deadline = what, time.monotonic() + session.timeout + GRACE
        session.worker.process.send((what, session.number, *given))

    def _place(self) -> None:
        """Give waiting sessions a worker, in their order."""
        later: deque[_Session] = deque()
        while self._queue and self.open_sessions < self._most:
            session = self._queue.popleft()
            worker = self._worker_for(session)
            if worker is None:
                later.append(session)
                continue
            session.worker, session.waits_for = worker, None
            worker.sessions[session.number] = session
            self._ask(session, "open", *session.opening)
        self._queue.extendleft(reversed(later))

    def _worker_for(self, session: _Session) -> _Worker | None:
        alike = [worker for worker in self._workers if worker.alone == session.alone]
        usable = [worker for worker in alike if worker.has_room]
        if session.alone and not usable and len(alike) < self._num_workers:
            self._launch(alone=True)
        return min(usable, key=lambda worker: len(worker.sessions), default=None)

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call."""
        self._turn(0.0)
        answers, self._answers = self._answers, []
        return answers

    def wait(self, seconds: float) -> None:
        """Wait until `poll` has something to return, for this time at most."""
        end = time.monotonic() + seconds
        while self.pending and not self._answers and (left := end - time.monotonic()) > 0:
            self._turn(left)

    def _turn(self, seconds: float) -> None:
        block = min([seconds, *(worker.due - time.monotonic() for worker in self._workers)])
        while ready := self._selector.select(max(0.0, block)):
            block = 0.0
            for key, _ in ready:
                self._receive(key.data)
        now = time.monotonic()
        for worker in [*self._workers]:
            if worker.due > now:
                continue
            if worker.deadline <= now:
                worker.error = f"not loaded within {STARTUP_TIMEOUT:g} s"
                self._replace(worker)
            elif worker.asked is None:
                worker.asked = now
                worker.process.send(("ping", 0))
            else:  # code that holds Python's lock may be that of any call
                late = (s.late for s in worker.sessions.values() if s.deadline <= now)
                self._replace(worker, why=next(late, "timeout: it does not listen"))
        self._place()

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, *fields = message_of(worker.process.connection.recv_bytes(MAX_MESSAGE))
        except (EOFError, OSError, BadMessage):
            self._replace(worker)
            return
        if kind == "ready":
            self._started = worker.ready = True
            worker.deadline = math.inf
            worker.process.watch_memory()
        elif kind == "loading":
            worker.loading = str(fields[0])
        elif kind == "unloadable":
            worker.error = str(fields[0])
        elif kind == "pong":
            worker.asked, now = None, time.monotonic()
            if late := [s for s in worker.sessions.values() if s.deadline <= now]:
                self._replace(worker, {s.number: s.late for s in late})
        elif kind == "worn":
            if not worker.worn and not worker.alone:
                self._launch()
            worker.worn = True
        else:
            self._take(worker, *fields)

    def _take(
        self, worker: _Worker, number: int, result: Any, failure: str | None, state: str
    ) -> None:
        session = worker.sessions.get(number)
        if session is None or session.waits_for is None:
            return
        try:
            result = checked(session.waits_for, result, failure)
        except (TypeError, ValueError, BadMessage):  # a tool has written to the pipe
            self._replace(worker, {number: "crashed: the worker has sent nonsense"})
            return
        self._deaths = 0
        what, session.waits_for, session.deadline = session.waits_for, None, math.inf
        if session.key is None:  # closed meanwhile
            self._leave(session)
            worker.process.send(("close", number))
            return
        if failure is not None and failure.startswith("out_of_memory"):
            self._replace(worker, {number: failure})  # it may still hold the memory
            return
        self._answers.append(self._answer(session.key, what, result, failure, str(state)))
        if failure is not None:
            del self._sessions[session.key]
            self._leave(session)
            worker.process.send(("close", number))

    def _answer(
        self, key: Hashable, what: str, result: Any, failure: Any, state: str = ""
    ) -> Answer:
        """Return an answer; of functions that gave none because of a failure it is their result."""
        if what == "reward" and failure is not None and self._rewards is not None:
            lost = Result(None, None, failure, {}, {})
            return Answer(key, what, dict.fromkeys(self._rewards.of_environments, lost), None)
        return Answer(key, what, result, failure, state)

    def _end(self, worker: _Worker) -> str:
        """Kill a worker, and return how it ended."""
        self._selector.unregister(worker.process.connection)
        self._workers.remove(worker)
        death = worker.process.kill()
        kill_strays([worker.process])
        return death

    def _replace(
        self, worker: _Worker, to_blame: Mapping[int, str] | None = None, why: str = ""
    ) -> None:
        """Kill a worker and launch another one."""
        death = self._end(worker)
        if not worker.ready and (worker.error or not self._started):
            raise RunFailed(
                f"The {worker.loading or 'first module'} cannot be loaded in an environment worker:"
                f" {worker.error or death}. Tools and environments run in separate processes: they,"
                " and all they use, must be importable there."
            )
        working = [s for s in worker.sessions.values() if s.waits_for is not None]
        if to_blame is None:
            why = worker.process.too_much or why or f"crashed: the worker {death}"
            to_blame = {s.number: why for s in working} if len(working) == 1 else {}
            self._suspects.update(s.key for s in working)
            self._deaths += not to_blame
        ended = {session.key for session in worker.sessions.values()}
        self._answers = [answer for answer in self._answers if answer.key not in ended]
        for number, session in worker.sessions.items():
            if session.key is None:  # closed
                continue
            failure = to_blame.get(number)
            what = "lost" if failure is None else session.waits_for or "call"
            self._answers.append(self._answer(session.key, what, None, failure))
            del self._sessions[session.key]
        if self._deaths > MAX_DEATHS:
            raise RunFailed(
                f"{self._deaths} environment workers in a row have ended before anything was "
                f"answered: the last {death}. Look for what ends processes on this machine."
            )
        if not worker.alone and not worker.worn:
            self._launch()

    def end_round(self) -> None:
        """End all sessions; the workers stay."""
        for session in self._queue:
            del self._sessions[session.key]
        self._queue.clear()
        for key in [*self._sessions]:
            self.close(key)
        self._suspects.clear()

    def shut_down(self) -> None:
        """Kill the workers and forget all sessions."""
        for worker in self._workers:
            self._selector.unregister(worker.process.connection)
        _kill_all(self._workers, os.getpid())
        self._sessions.clear()
        self._queue.clear()
        self._answers.clear()


def _kill_all(workers: list[_Worker], owner: int) -> None:
    """Kill all workers. Not a method, as it runs when the scheduler is garbage-collected."""
    if os.getpid() == owner and workers:  # a forked child leaves its parent's workers alone
        for worker in workers:
            worker.process.kill()
        kill_strays([worker.process for worker in workers])
        workers.clear()
