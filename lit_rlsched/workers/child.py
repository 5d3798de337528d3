"""What runs in a worker: it loads what it is sent, calls it and tells. Imports little."""

import contextlib
import faulthandler
import functools
import inspect
import json
import math
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lit_rlsched.processes import die_with
from lit_rlsched.text import is_deep

LOGGED_KINDS = ("no_answer", "unparsed")
"""Kinds of failure that a function reports itself, with `log_failure`."""
WITHHELD: set[str] = set()
"""Environment variables that the trainer has and this process does not."""


class Child:
    """This process, with a pipe to the trainer; gets the arguments of a `ChildProcess`."""

    def __init__(self, connection: int, lifeline: int, parent: int) -> None:
        die_with(parent, lifeline)
        faulthandler.enable()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # the trainer has no standard output
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self.connection = Connection(connection)
        self.write: Callable[[bytes], object] = self.connection.send_bytes
        """How a message is sent."""
        self._pid = os.getpid()
        self.offered: Sequence[set[str]] = ()
        """Arguments besides TRL's that each reward function is called with."""

    def load(self) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Import everything, and return it by its key, with the rest of what was sent.

        Each thing is announced, so that the parent can name one that fails.
        """
        # a forked child must not keep the pipe open after this process has died
        os.register_at_fork(after_in_child=self.connection.close)
        setup = pickle.loads(self.connection.recv_bytes())
        sys.path[:] = setup["sys_path"]
        sys.argv[1:] = []
        self.offered = setup["offered"]
        WITHHELD.update(setup["withheld"])
        loaded: dict[Any, Any] = {}
        for what, key, pickled in setup["loads"]:
            self.send("loading", what)
            try:
                loaded[key] = pickle.loads(pickled)
                if isinstance(key, int):  # a reward function
                    getattr(loaded[key], "warm_up", lambda: None)()
            except BaseException as error:
                self.send("unloadable", describe(error))
                raise SystemExit(1) from None
        limit_memory(setup["memory_limit"])
        self.send("ready")
        return loaded, setup

    def send(self, *message: Any) -> None:
        if os.getpid() != self._pid:  # a child that the function forked has returned from it too
            os._exit(0)
        self.write(json.dumps(message, default=plain).encode())


class Call:
    """One call of one function. As a context manager it turns any exception into a failure."""

    def __init__(
        self, key: int, index: int, payload: bytes, timeout: float, offered: set[str]
    ) -> None:
        self.key = key
        self.index = index
        self.timeout = timeout
        self.start = 0.0
        self.score: float | None = None
        self.failure: str | None = None
        self.extra: dict[str, Any] = {}
        self.metrics: dict[str, list[float]] = {}
        self.late = f"timeout: no score within {timeout:g} s"
        self._payload = payload
        self._offered = offered

    def keywords(self) -> dict[str, Any]:
        """Return TRL's keyword arguments as lists of length one, copied for every call."""
        row = pickle.loads(self._payload)
        trainer_state = row.pop("trainer_state")
        keywords = {name: [value] for name, value in row.items()}
        keywords["completion_ids"] = [row["completion_ids"].tolist()]
        # TRL has no such column: a function that lists its arguments must run unchanged
        if "finish_reasons" not in self._offered:
            keywords.pop("finish_reasons", None)
        ours = {"log_failure": self._log_failure, "reward_timeout": self.timeout}
        return {
            **keywords,
            "trainer_state": trainer_state,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
            **{name: value for name, value in ours.items() if name in self._offered},
        }

    def take(self, result: Any) -> None:
        """Accept what the function returned: an iterable of one number or None."""
        if self.failure is not None:  # logged by the function
            return
        if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
            self.failure = f"bad_return: {type(result).__name__} is not a list of scores"
            return
        scores = list(result)
        if len(scores) != 1:
            self.failure = f"bad_return: {len(scores)} scores for 1 completion"
        elif scores[0] is None:
            pass
        elif isinstance(scores[0], str) or not hasattr(scores[0], "__float__"):
            self.failure = f"bad_return: {scores[0]!r:.80} is not a number"
        elif math.isinf(score := float(scores[0])):
            self.failure = f"bad_return: {score}"
        elif not math.isnan(score):
            self.score = score

    @property
    def logged(self) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """What was logged; nothing if it cannot be sent, as the score still counts."""
        logged = self.extra, self.metrics
        try:
            json.dumps(logged, default=plain)
        except (TypeError, ValueError, RecursionError):
            return {}, {}
        return ({}, {}) if is_deep(logged) else logged

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column] = values[0] if len(values) == 1 else list(values)

    def _log_failure(self, kind: str, reason: str) -> None:
        if kind not in LOGGED_KINDS:
            raise ValueError(f"log_failure({kind!r}, ...): use one of {LOGGED_KINDS}")
        self.failure = f"{kind}: {reason[:500]}"

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # frees memory for the report
            self.failure = f"out_of_memory: {describe(error)}"
        elif error is not None:
            self.failure = f"raised: {describe(error)}"
        return True


def limit_memory(more: int) -> None:
    """Let this process allocate so many bytes on top of what it holds; beyond, MemoryError.

    The kernel counts private writable memory (`RLIMIT_DATA`) when it is requested, also while C
    code holds the GIL, and each process that a function starts inherits the limit. A limit on
    address space (`RLIMIT_AS`) would count memory that CUDA reserves and never touches. Linux only.
    """
    if sys.platform != "linux":
        return
    import resource

    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if held is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(held[1]) * 1024 + more
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def describe(error: BaseException) -> str:
    """Return the error and the place where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    if isinstance(error, KeyError) and str(error.args[:1])[2:-3] in WITHHELD:
        where += (
            ". Reward workers do not see this environment variable: list it in `reward_env_vars`"
        )
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


def plain(value: Any) -> Any:
    """Convert numbers and arrays of other libraries to Python's, and anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine."""
    function = unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
