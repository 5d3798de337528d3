"""A worker that holds environments and calls tools. Run as a script; without torch."""

import asyncio
import base64
import json
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

# for this import only: the package of the parent, even if another copy is installed
sys.path.insert(0, str(Path(__file__).parents[2]))
from lit_rlsched.text import content_text, is_deep, printable
from lit_rlsched.workers.child import Call, Child, describe, is_async

del sys.path[0]

MAX_REPLY = 4 << 20
"""Characters of a reply that are sent: more never fit into a completion."""
MAX_STATE = 32 << 20
"""Bytes of a state."""
THREADS = 256
"""Sync calls that may run at the same time."""
STACK = 1 << 20
"""Bytes of stack of each, which count towards the limit on memory."""


class Late(BaseException):
    """An async call has taken too long. No `Exception`: it is no reply of a tool."""


@dataclass
class EnvSession:
    """The object and the tools of one completion."""

    name: str | None
    instance: Any
    tools: Mapping[str, Any]


class Sessions(Child):
    """Holds a session for each completion; calls of different ones run at the same time."""

    def serve(self) -> None:
        """Answer until the parent closes the connection."""
        self._tools: dict[str, Callable[..., Any]] = {}
        self._factories: dict[str | None, Callable[[], Any]] = {}
        self._rewards: dict[int, Callable[..., Any]] = {}
        self._sessions: dict[int, EnvSession] = {}
        self._idle: dict[str | None, list[Any]] = {}
        """Objects whose session is over, by environment: made once, reset often, as in TRL."""
        self._running: set[asyncio.Task[None]] = set()
        loaded, setup = self.load()
        for key, one in loaded.items():
            match key:
                case "tool", name:
                    self._tools[name] = one
                case "environment", name:
                    self._factories[name] = one
                case index:
                    self._rewards[index] = one
        self._methods, self._timeout = setup["methods"], setup["timeout"]
        self._with_state = setup["with_state"]  # environments whose state is sent with each answer
        threading.stack_size(STACK)
        self._threads = ThreadPoolExecutor(THREADS)
        # answers are sent in a thread: the trainer may send before it reads
        outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def send_all() -> None:
            while True:
                self.connection.send_bytes(outbox.get())

        self.write = outbox.put
        threading.Thread(target=send_all, daemon=True).start()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def read() -> None:
            try:
                what, key, *given = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                if not over.done():
                    over.set_result(None)
                return
            if what == "ping":
                self.send("pong")
            elif what == "close":
                session = self._sessions.pop(key, None)
                if session is not None and session.instance is not None:
                    self._idle.setdefault(session.name, []).append(session.instance)
            else:
                task = loop.create_task(self._answer(what, key, *given))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

        loop.add_reader(self.connection.fileno(), read)
        await over
        os._exit(0)  # a thread may still run a tool

    async def _answer(self, what: str, key: int, *given: Any) -> None:
        failure: str | None = None
        result: Any = None
        state, limit = "", self._timeout
        try:
            if what == "open":
                result = await self._open(key, *given)
            elif what == "call":
                result = await self._call(self._sessions[key], *given)
            else:
                result = await self._reward(self._sessions[key], *given)
            if what != "reward" and self._sessions[key].name in self._with_state:
                kept = await self._run(self._sessions[key].instance.state_dict, limit)
                state = await self._run(partial(_packed, kept), limit)
        except MemoryError as error:
            traceback.clear_frames(error.__traceback__)  # frees memory for the report
            failure = f"out_of_memory: {describe(error)}"
        except Late:
            failure = f"timeout: no answer within {self._timeout:g} s"
        except BaseException as error:
            failure = f"raised: {describe(error)}"
        self.send("answer", key, result, failure, state)

    async def _open(
        self, key: int, name: str | None, columns: dict[str, Any], state: str
    ) -> str | None:
        """Begin a session, and return what `reset` has returned, or load a state in its place."""
        instance, tools, observation, limit = None, self._tools, None, self._timeout
        if name in self._factories:
            idle = self._idle.get(name)
            instance = idle.pop() if idle else await self._run(self._factories[name], limit)
            if state:
                kept = await self._run(partial(pickle.loads, base64.b64decode(state)), limit)
                await self._run(partial(instance.load_state_dict, kept), limit)
            else:
                observation = await self._run(instance.reset, limit, **columns)
            tools = tools | {method: getattr(instance, method) for method in self._methods[name]}
        self._sessions[key] = EnvSession(name, instance, tools)
        return None if observation is None else text_of(observation)

    async def _call(
        self, session: EnvSession, calls: Sequence[tuple[str, Any]]
    ) -> list[tuple[str, str | list[Any], bool]]:
        """Call tools in TRL's order: sync ones one after the other, then async ones together."""
        replies, waiting = [], []
        for name, arguments in calls:
            tool = session.tools.get(name)
            if tool is not None and is_async(tool):
                waiting.append((name, tool, arguments))
            else:
                replies.append(await self._reply(name, tool, arguments))
        return replies + list(await asyncio.gather(*(self._reply(*each) for each in waiting)))

    async def _reply(
        self, name: str, tool: Any, arguments: Any
    ) -> tuple[str, str | list[Any], bool]:
        """Return the name of a tool, its reply and whether the call has failed."""
        try:
            if tool is None:
                raise ValueError(f"Tool {name} not found.")
            if not isinstance(arguments, dict):
                what = json.dumps(arguments)[:80]
                raise ValueError(f"The arguments of {name} must be a JSON object, not {what}.")
            return name, content_of(await self._run(tool, self._timeout, **arguments)), False
        except (MemoryError, Late):
            raise
        except BaseException as error:
            return name, text_of({"error": str(error)}), True

    async def _reward(
        self, session: EnvSession, payload: bytes, timeout: float
    ) -> list[tuple[Any, ...]]:
        """Call the reward functions; return number and the fields of a `Result` of each."""
        results = []
        for index, function in self._rewards.items():
            call = Call(0, index, payload, timeout, self.offered[index])
            with call:
                given = {**call.keywords(), "environments": [session.instance]}
                try:
                    call.take(await self._run(function, timeout, **given))
                except Late:
                    call.failure = call.late
            seconds = time.monotonic() - call.start
            results.append((index, seconds, call.score, call.failure, *call.logged))
        return results

    async def _run(self, function: Callable[..., Any], seconds: float, /, **arguments: Any) -> Any:
        """Call a function; raises `Late` if an async one takes longer.

        The trainer ends a sync one that does, and this process with it.
        """

        def outcome() -> tuple[Any, BaseException | None]:
            try:
                return function(**arguments), None
            except BaseException as error:  # a future takes no `StopIteration`
                return None, error

        if not is_async(function):
            loop = asyncio.get_running_loop()
            result, error = await loop.run_in_executor(self._threads, outcome)
            if error is not None:
                raise error
            return result
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                return await function(**arguments)
        except TimeoutError:
            if scope.expired():
                raise Late from None
            raise


def _packed(state: Any) -> str:
    """Return a state as text; raises if it is too large."""
    pickled = cloudpickle.dumps(state)  # classes of the user's script too
    if len(pickled) > MAX_STATE:
        raise ValueError(f"`state_dict` returned {len(pickled)} bytes; at most {MAX_STATE} fit")
    return base64.b64encode(pickled).decode()


def content_of(reply: Any) -> str | list[Any]:
    """Return a reply as the content of a message, as TRL does: a list, or a text.

    A list that JSON would change, as it holds tuples or objects, is its text too: it is as Python
    prints it, which is what most templates make of a list.
    """
    if not isinstance(reply, list):
        return text_of(reply)
    parts = [part for part in reply if isinstance(part, dict)]
    if any(part.get("type") == "image" and "image" in part for part in parts):
        raise TypeError("the reply has an image")
    text = str(reply)
    try:
        sent = json.loads(json.dumps(reply))
    except (TypeError, ValueError, RecursionError):
        return text_of(text)
    same = str(sent) == text and len(text) <= MAX_REPLY and not is_deep(sent)
    return printable(sent) if same else text_of(text)


def text_of(reply: Any) -> str:
    """Return a reply as text."""
    text = content_text(reply) if isinstance(reply, list) else str(reply)
    # half of a surrogate pair, as in JSON of a model, is no text for a tokenizer
    return text[:MAX_REPLY].encode(errors="replace").decode()


if __name__ == "__main__":
    Sessions(*map(int, sys.argv[1:])).serve()
