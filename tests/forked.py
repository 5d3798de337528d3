"""Processes that begin with all imports done: forks of one that has imported `preloaded`.

Python takes eight seconds to import torch, Lightning and this library, and ten more for vLLM. Each
worker of the tests has one such server, which starts with the first call.
"""

import functools
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lit_rlsched.engines import _engine_server
from lit_rlsched.processes import ChildProcess


def server() -> Any:
    """The context whose processes are forks of a process that has done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # this version of Python may not give it `sys.path`
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


def run(
    function: Callable,
    *arguments: Any,
    timeout: float,
    folder: Path | str = ".",
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """Call a function in a fork, in a session of its own; its exit status and what it printed."""
    with tempfile.TemporaryDirectory() as place:
        logs = [Path(place, name) for name in ("stdout", "stderr")]
        called = function, arguments, os.fspath(folder), dict(environment), logs
        process = server().Process(target=call, args=called)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"still runs after {timeout} s:\n{logs[1].read_text()}")
        printed = [log.read_text() for log in logs]
        return subprocess.CompletedProcess(arguments, process.exitcode, *printed)


def call(
    function: Callable, arguments: tuple, folder: str, environment: dict, logs: list[Path]
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for log, stream in zip(logs, (sys.stdout, sys.stderr), strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    keep_frozen()
    sys.exit(function(*arguments))


class EngineProcess(ChildProcess):
    """The process of an engine as a fork of the server, in place of a new Python."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        lifeline, held = multiprocessing.Pipe(duplex=False)
        ready, tells = multiprocessing.Pipe(duplex=False)
        given = arguments[-1], theirs, lifeline, tells, dict(environment)
        process = server().Process(target=serve, args=given, daemon=True)
        process.start()
        self.process: Any = Joined(process)
        self._lifeline = os.dup(held.fileno())
        for end in (theirs, lifeline, held, tells):
            end.close()
        ready.recv()  # from here on it has a process group of its own
        ready.close()


class Joined:
    """What `ChildProcess` needs of `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the engine", timeout or 0.0)
        return self.returncode


def serve(
    cores: str, connection: Any, lifeline: Any, tells: Any, environment: Mapping[str, str]
) -> None:
    os.setsid()
    tells.send(None)
    tells.close()
    multiprocessing.current_process()._config["daemon"] = False  # may have children
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    keep_frozen()
    _engine_server.main(cores, os.dup(connection.fileno()), lifeline.fileno(), os.getppid())


def collect_less() -> None:
    """Collect garbage more seldom: Python's thresholds cost 3 % of the tests' time."""
    gc.set_threshold(50_000, 20, 50)


def wrap_kernels_once() -> None:
    """Let vLLM search all modules for kernels to wrap once, and not for a second at each start."""
    if (cpu := sys.modules.get("vllm.platforms.cpu")) is not None:
        register = cpu.CpuPlatform.register_triton_kernel_overrides
        if not hasattr(register, "cache_info"):
            once = functools.cache(register)
            cpu.CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


def keep_frozen() -> None:
    """Keep vLLM, which collects garbage again and again, from thawing what is frozen."""
    collect_less()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


class VLLMWorkers:
    """The context in which vLLM starts a split model's processes, as forks of the server."""

    def __init__(self) -> None:
        self._server = server()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def Process(self, *, target: Callable, kwargs: dict, **more: Any) -> Any:
        given = dict(os.environ), target
        return self._server.Process(target=work, args=given, kwargs=kwargs, **more)


def work(environment: Mapping[str, str], target: Callable, **given: Any) -> None:
    import_module("setproctitle").getproctitle()  # it looks for the first environment
    os.environ.clear()
    os.environ.update(environment)
    keep_frozen()
    target(**given)


def script(path: str, stdin: str, *arguments: str) -> None:
    """`python PATH` with these arguments and this input."""
    sys.argv, sys.stdin = [path, *arguments], io.StringIO(stdin)
    runpy.run_path(path, run_name="__main__")


def command_line(*arguments: str) -> None:
    """`python -m lit_rlsched` with these arguments, as a rank where the environment says so."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = int(os.environ.get("RANK", 0))  # read when Lightning was imported
    sys.argv = ["lit-rlsched", *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module("lit_rlsched", run_name="__main__", alter_sys=True)
