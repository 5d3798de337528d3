"""Sessions of environments in worker processes, with time-outs and limits, as rewards have them."""

import math
import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from lit_rlsched import workers as package
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.processes import worker_environment
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.workers.pool import (
    BadMessage,
    Pool,
    Result,
    Worker,
    Workers,
    machine_memory,
    packed_row,
    pickled,
)

MAX_OPENING = 32
"""Sessions that a worker opens at the same time: the others' time does not begin yet."""
GRACE = 1.0
"""Seconds that a worker has to stop a late coroutine itself, and then to say that it listens."""


class Answer(NamedTuple):
    """What an environment has answered, or why it has not."""

    key: Hashable
    what: str
    """`open`, `call`, `reward`; or `lost`: its worker has died because of another session."""
    result: Any
    """Of `open` the observation, of `call` name, reply and failure of each call, of `reward` the
    results of functions by number."""
    failure: str | None
    """Begins with `raised`, `timeout`, `crashed` or `out_of_memory`."""
    state: str = ""
    """State of the environment after that, if its class gives one; `open` takes it."""


def checked(what: str, result: Any, failure: Any) -> Any:
    """Return the result of an answer, whose parts have the types that they must have."""
    try:
        if failure is not None:
            if type(failure) is not str:
                raise TypeError
            return None
        if what == "open":
            return result if result is None else str(result)
        if what == "call":
            return [
                (str(name), content if type(content) is list else str(content), bool(failed))
                for name, content, failed in result
            ]
        return {int(index): Result.received(*fields) for index, *fields in result}
    except (TypeError, ValueError):
        raise BadMessage(f"an answer with wrong types: {result!r:.80}") from None


@dataclass(slots=True, eq=False)
class EnvSession:
    """The session of a completion, as the trainer sees it."""

    key: Hashable
    number: int
    """Its name in the worker."""
    opening: tuple[Any, ...]
    alone: bool = False
    worker: "EnvironmentWorker | None" = None
    waits_for: str | None = None
    """The answer that it waits for."""
    timeout: float = 0.0
    """Seconds that it may take."""
    deadline: float = math.inf

    @property
    def late(self) -> str:
        """What to say of an answer that did not come in time."""
        return f"timeout: no answer within {self.timeout:g} s"


class EnvironmentWorker(Worker):
    """A process of `workers/sessions.py`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: float | None = None
        """When it was asked whether it still listens, because an answer is late."""
        self.sessions: dict[int, EnvSession] = {}

    def takes(self, session: EnvSession) -> bool:
        """Return whether it can open this session now."""
        if session.alone or any(other.alone for other in self.sessions.values()):
            return self.ready and not self.sessions
        opening = sum(other.waits_for == "open" for other in self.sessions.values())
        return self.ready and opening < MAX_OPENING

    @property
    def due(self) -> float:
        if self.asked is not None:
            return self.asked + GRACE
        return min([self.deadline, *(session.deadline for session in self.sessions.values())])


class EnvironmentScheduler(Workers[EnvironmentWorker]):
    """Opens sessions, calls tools and collects the answers, without waiting for any of them.

    A session stays in its worker. A call that takes too long, crashes or takes too much memory
    costs its own session: the worker is killed, and its other sessions are `lost`, to be opened
    again. If it is not clear whose call it was, each of them is opened again alone in a worker,
    once one is empty.
    """

    kind = "environment"
    loads = "Tools and environments"
    script = Path(*package.__path__) / "sessions.py"
    make = EnvironmentWorker

    def __init__(
        self,
        environments: Environments,
        rewards: RewardScheduler | None = None,
        *,
        workers: int = 1,
        timeout: float = 60.0,
        max_sessions: int | None = None,
        env_vars: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.environments = environments
        self._rewards = rewards
        self.scores = rewards is not None and bool(rewards.of_environments)
        """Whether reward functions are called with environments."""
        self.timeout = timeout
        self._num_workers = workers
        # completions take their places in `Turns`; this counts what ends with its answer too
        self._most = math.inf if max_sessions is None else max_sessions
        self._env_vars = env_vars
        self._sessions: dict[Hashable, EnvSession] = {}
        self._suspects: set[Hashable] = set()
        """Keys of sessions that may have ended a worker."""
        self._numbers = count(1)
        self.cache: Counter[str] = Counter()
        """Calls that were looked for in a cache, and those that were found there."""

    @property
    def pending(self) -> int:
        """Number of answers that `poll` has not returned yet."""
        waiting = sum(s.waits_for is not None for s in self._sessions.values())
        return waiting + len(self._came)

    @property
    def open_sessions(self) -> int:
        """Number of sessions that have a worker."""
        return sum(len(worker.sessions) for worker in self._workers)

    def start(self) -> None:
        """Launch the workers and wait until they have imported tools and classes."""
        if self._pools:
            return
        kinds, rewards = self.environments.by_name, self._rewards
        loads: list[tuple[str, Any, bytes]] = []
        for tool, function in self.environments.tools.items():
            sent = pickled(f"The tool `{tool}`", function)
            loads.append((f"The tool {tool}", ("tool", tool), sent))
        for name, kind in kinds.items():
            if (made := kind.factory) is not None:
                sent = pickled(f"The environment `{name or getattr(made, '__name__', made)}`", made)
                loads.append((f"The environment {name}", ("environment", name), sent))
        if rewards is not None:
            loads += [rewards.loaded(index) for index in rewards.of_environments]
        setup = {
            "loads": loads,
            "methods": {name: kind.methods for name, kind in kinds.items()},
            "with_state": {name for name, kind in kinds.items() if kind.has_state},
            "timeout": self.timeout,
            "offered": rewards.offered if rewards else (),
            "memory_limit": machine_memory() // 2 // self._num_workers,
        }
        self._begin(Pool(setup, worker_environment(self._env_vars), self._num_workers))

    def open(
        self, key: Hashable, name: str | None, columns: Mapping[str, Any], state: str = ""
    ) -> None:
        """Begin a session; the answer is the observation of `reset`, or None."""
        assert key not in self._sessions, f"{key} is open"
        self.start()
        opening, alone = (name, dict(columns), state), key in self._suspects
        session = EnvSession(key, next(self._numbers), opening, alone, waits_for="open")
        self._sessions[key] = session
        self._pools[0].queue.append(session)
        self._feed()

    def call(self, key: Hashable, calls: Sequence[tuple[str, Any]]) -> None:
        """Call tools; the answer has name, reply and failure of each call."""
        self._ask(self._sessions[key], "call", list(calls))

    def needs_another_to_end(self, key: Hashable) -> bool:
        """Whether a session may wait for a worker until others end, as some are opened alone."""
        session = self._sessions.get(key)
        return session is not None and session.worker is None and bool(self._suspects)

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
        self._came = [answer for answer in self._came if answer.key != key]
        self._suspects.discard(key)
        if session.worker is not None and session.waits_for is not None:
            session.key = None  # it ends with its answer, or when its time is up
            return
        if session.worker is None:
            self._pools[0].queue.remove(session)
        else:
            del session.worker.sessions[session.number]
            session.worker.send(("close", session.number))
        self._feed()

    def forget(self, key: Hashable) -> None:
        """End a session, which is not opened again."""
        self.close(key)
        self._suspects.discard(key)

    def _ask(
        self, session: EnvSession, what: str, *given: Any, seconds: float | None = None
    ) -> None:
        assert session.worker is not None and session.waits_for is None
        session.timeout = seconds or self.timeout
        session.waits_for, session.deadline = what, time.monotonic() + session.timeout + GRACE
        session.worker.send((what, session.number, *given))

    def _feed(self) -> None:
        """Give waiting sessions a worker, in their order."""
        for pool in self._pools:
            later: deque[EnvSession] = deque()
            while pool.queue and self.open_sessions < self._most:
                session = pool.queue.popleft()
                usable = [worker for worker in pool.workers if worker.takes(session)]
                if not usable:
                    later.append(session)
                    continue
                session.worker = min(usable, key=lambda worker: len(worker.sessions))
                session.worker.sessions[session.number] = session
                session.waits_for = None
                self._ask(session, "open", *session.opening)
            pool.queue.extendleft(reversed(later))

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call."""
        self.serve()
        answers, self._came = self._came, []
        return answers

    def _overdue(self, worker: EnvironmentWorker) -> None:
        now = time.monotonic()
        if worker.asked is None:
            worker.asked = now
            worker.send(("ping", 0))
        else:  # code that holds Python's lock may be that of any call
            late = (s.late for s in worker.sessions.values() if s.deadline <= now)
            self._replace(worker, next(late, "timeout: it does not listen"))

    def _received(self, worker: EnvironmentWorker, kind: str, fields: list[Any]) -> None:
        if kind == "pong":
            worker.asked, now = None, time.monotonic()
            if late := {n: s.late for n, s in worker.sessions.items() if s.deadline <= now}:
                self._replace(worker, to_blame=late)
            return
        if kind != "answer":
            raise BadMessage(f"`{kind}`, which is of other workers")
        number, result, failure, state = fields
        session = worker.sessions.get(number)
        if session is None or session.waits_for is None:
            return
        result = checked(session.waits_for, result, failure)
        worker.pool.deaths.clear()
        what, session.waits_for, session.deadline = session.waits_for, None, math.inf
        if session.key is not None and failure is not None and failure.startswith("out_of_memory"):
            self._replace(worker, to_blame={number: failure})  # it may still hold the memory
            return
        if session.key is not None:
            self._came.append(self._answer(session.key, what, result, failure, str(state)))
        if session.key is None or failure is not None:  # closed meanwhile, or at an end
            self._sessions.pop(session.key, None)
            self._suspects.discard(session.key)
            del worker.sessions[number]
            worker.send(("close", number))

    def _answer(
        self, key: Hashable, what: str, result: Any, failure: Any, state: str = ""
    ) -> Answer:
        """Return an answer; of functions that gave none because of a failure it is their result."""
        if what == "reward" and failure is not None and self._rewards is not None:
            lost = Result(None, None, failure, {}, {})
            return Answer(key, what, dict.fromkeys(self._rewards.of_environments, lost), None)
        return Answer(key, what, result, failure, state)

    def _settle(
        self, worker: EnvironmentWorker, to_blame: Mapping[int, str] | None, why: str
    ) -> bool:
        working = [s for s in worker.sessions.values() if s.waits_for is not None]
        if to_blame is None and len(working) == 1:
            to_blame = {working[0].number: why}
        elif to_blame is None:
            to_blame = {}
            self._suspects.update(s.key for s in working if s.key is not None)
        ended = {session.key for session in worker.sessions.values()}
        self._came = [answer for answer in self._came if answer.key not in ended]
        for number, session in worker.sessions.items():
            if session.key is None:  # closed
                continue
            if failure := to_blame.get(number):
                self._suspects.discard(session.key)
            what = "lost" if failure is None else session.waits_for or "call"
            self._came.append(self._answer(session.key, what, None, failure))
            del self._sessions[session.key]
        return bool(to_blame)

    def shut_down(self) -> None:
        """Kill the workers and forget all sessions."""
        self._end_all()
        self._sessions.clear()
        self._came.clear()
