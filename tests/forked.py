"""Processes that begin with all imports done: forks of one that has imported vLLM and the rest.

Python takes eight seconds to import torch, Lightning and this library, and five more for vLLM. Each
worker of the tests has one such server, which starts with the first call.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

IMPORTS = [
    "vllm.v1.engine.llm_engine",
    "lit_rlsched.cli",
    "lit_rlsched.callbacks.pictures",
    "resumable_run",
    "faulty_run",
]


def run(
    function: Callable,
    *arguments: Any,
    timeout: float,
    folder: Path | str = ".",
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """Call a function in a fork, in a session of its own; its exit status and what it printed."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTS)
    with tempfile.TemporaryDirectory() as place:
        logs = [Path(place, name) for name in ("stdout", "stderr")]
        called = function, arguments, os.fspath(folder), dict(environment), logs
        process = server.Process(target=call, args=called)
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
    gc.freeze()  # vLLM collects garbage again and again, and thaws what is frozen
    gc.freeze = gc.unfreeze = lambda: None
    sys.exit(function(*arguments))


def command_line(*arguments: str) -> None:
    """`python -m lit_rlsched` with these arguments."""
    sys.argv = ["lit-rlsched", *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module("lit_rlsched", run_name="__main__", alter_sys=True)
