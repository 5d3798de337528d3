"""Replies of tools that are not computed twice, for classes and functions with `cacheable = True`.

The replies of an object depend on its class, the columns and the seed of `reset`, and on its calls
so far; that of a function on the arguments of the call. A session is opened in a worker once there
is something to compute. Compare TVCache (arXiv 2602.10986), which copies the object of an earlier
session where this makes the calls again.
"""

import json
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from lit_rlsched.environments.protocol import Environment, Environments
from lit_rlsched.environments.scheduler import Answer, EnvironmentScheduler

MAX_BYTES = 256 << 20
"""Bytes of the replies and states that are kept; the least recently used ones leave."""
OVERHEAD = 500
"""Bytes that each takes besides."""


class _Request(NamedTuple):
    """A method of `EnvironmentScheduler` to call, and the result that is expected of it."""

    what: str
    given: tuple[Any, ...]
    result: Any = None


@dataclass(slots=True)
class _Session:
    """A session as its completion sees it."""

    environment: Environment
    place: bytes = b""
    """Stands for class, columns, seed and the calls so far; empty if nothing is cached for it."""
    opened: bool = False
    """Whether a worker has it."""
    state: str = ""
    """State of its object, if its class gives one."""
    skipped: list[_Request] = field(default_factory=list)
    """What was answered from the cache, and is not made yet."""
    asked: list[_Request] = field(default_factory=list)
    """What is being made, one after the other: what was skipped, and something new."""
    keeps: bytes = b""
    """Where the result of the last of these is kept; empty if it is not."""


class CachingScheduler(EnvironmentScheduler):
    """Answers from a cache where it can.

    That changes no object. Before it is asked for what is not in the cache, or for a reward, its
    skipped calls are made, or it gets its state. If these calls have other replies than before, the
    session is `lost`, and nothing more of its class is cached. Failures and errors never are.
    """

    def __init__(self, environments: Environments, *args: Any, **settings: Any) -> None:
        super().__init__(environments, *args, **settings)
        self._kept: OrderedDict[bytes, tuple[Any, str]] = OrderedDict()
        """Results and states, by place."""
        self._bytes = 0
        self._own: dict[Hashable, _Session] = {}
        self._answers: list[Answer] = []
        """What `poll` returns next."""
        self._computed: dict[bytes, list[tuple[Hashable, _Request]]] = {}
        """Places whose result is being computed, and who waits for it besides."""
        self._refused: set[str | None] = set()
        """Environments that have answered the same calls otherwise."""

    def open(
        self, key: Hashable, name: str | None, columns: Mapping[str, Any], state: str = ""
    ) -> None:
        session = self._own[key] = _Session(self.environments.by_name[name], state=state)
        if session.environment.cacheable and name not in self._refused and not state:
            session.place = _hash(b"", pickle.dumps((name, columns)))
        self._look_up(key, _Request("open", (name, columns, state)), session.place)

    def call(self, key: Hashable, calls: Sequence[tuple[str, Any]]) -> None:
        session, text = self._own[key], json.dumps(calls).encode()
        functions = {name for name, _ in calls} & self.environments.tools.keys()
        cached = functions <= self.environments.cacheable_tools
        if cached and len(functions) == len({name for name, _ in calls}):
            place = _hash(b"", text)
        else:
            session.place = session.place and _hash(session.place, text)
            place = session.place if cached else b""
        self.cache["lookups"] += bool(place)
        self._look_up(key, _Request("call", (calls,)), place)

    def reward(self, key: Hashable, row: Mapping[str, Any], timeout: float | None = None) -> None:
        self._look_up(key, _Request("reward", (row, timeout)), b"")

    def close(self, key: Hashable) -> None:
        session = self._own.pop(key, None)
        self._answers = [answer for answer in self._answers if answer.key != key]
        super().close(key)
        if session is not None:
            for waiting in self._computed.values():
                waiting[:] = [each for each in waiting if each[0] != key]
            self._done(session)

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._answers) or super().wait(timeout)

    def poll(self) -> list[Answer]:
        for answer in super().poll():
            self._use(answer)
        answers, self._answers = self._answers, []
        return answers

    def _look_up(self, key: Hashable, request: _Request, place: bytes) -> None:
        """Answer from the cache, or once another session has the result, or ask a worker."""
        session = self._own[key]
        if place in self._kept:
            self._kept.move_to_end(place)
            result, state = self._kept[place]
            self.cache["hits"] += request.what == "call"
            if place == session.place:
                session.skipped.append(request._replace(result=result))
                session.state = state
            self._answers.append(Answer(key, request.what, result, None, session.state))
            return
        if place in self._computed:
            self._computed[place].append((key, request))
            return
        if place and key not in self._suspects:  # which may wait for the others to end
            self._computed[place] = []
        session.keeps, session.asked = place, [*session.skipped, request]
        if session.skipped and session.state and not session.opened:
            name, columns, _ = session.skipped[0].given
            session.asked[:-1] = [_Request("open", (name, columns, session.state))]
        session.skipped = []
        self._ask_next(key)

    def _ask_next(self, key: Hashable) -> None:
        what, given, _ = self._own[key].asked[0]
        self._own[key].opened = True
        getattr(EnvironmentScheduler, what)(self, key, *given)

    def _use(self, answer: Answer) -> None:
        """Go on with what a session is asked for, or pass an answer on."""
        session = self._own[answer.key]
        if answer.what == "lost" or answer.failure is not None:
            last = session.asked[-1].what if session.asked else answer.what
            if answer.what != "lost":
                answer = answer._replace(what=last)
            self._answers.append(answer)
            self._done(session)
            return
        expected = session.asked.pop(0).result
        if not session.asked:
            session.state = answer.state
            self._answers.append(answer)
            self._done(session, answer)
        elif answer.result == expected:
            self._ask_next(answer.key)
        else:
            self._refused.add(session.environment.name)
            for other in self._own.values():
                if other.environment is session.environment:
                    other.place = b""
            super().close(answer.key)
            self._answers.append(Answer(answer.key, "lost", None, None))
            self._done(session)

    def _done(self, session: _Session, answer: Answer | None = None) -> None:
        """Keep a result, and give it to those that wait for it; without one each asks for it."""
        place, session.keeps, session.asked = session.keeps, b"", []
        failed = answer is None or (answer.what == "call" and any(f for _, _, f in answer.result))
        if answer is not None and place and not failed:
            self._kept[place] = answer.result, answer.state
            self._bytes += _size(self._kept[place])
            while self._bytes > MAX_BYTES:
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        for key, request in self._computed.pop(place, ()):
            self._look_up(key, request, b"" if failed else place)


def _hash(place: bytes, what: bytes) -> bytes:
    return blake2b(place + what).digest()


def _size(kept: tuple[Any, str]) -> int:
    return len(str(kept[0])) + len(kept[1]) + OVERHEAD
