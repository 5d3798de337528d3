"""The checks themselves, on CPU with tiny limits: they run, and what needs a GPU is skipped.

`test_runner.py` tests the processes of the checks. Here they are forks of one that has imported
vLLM, which takes longer than most checks.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import child, runner
from benchmarks.gpu_check.checks import CHECKS

SKIPPED = {"environment", "tiny-fp32-graphs", "tiny-bf16-graphs", "sleep-cycles"}
if len(os.sched_getaffinity(0)) < 2:
    SKIPPED.add("two-devices")
MODULES = {check.function.partition(":")[0] for check in CHECKS}


def run_forked(command, limit, output, environment):
    """In place of `runner._run`."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["vllm.v1.engine.llm_engine", "lit_rlsched.cli", *MODULES])
    process = server.Process(target=check, args=(command[3:], dict(environment), output.name))
    process.start()
    process.join(limit)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return code


def check(arguments, environment, log):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream.fileno())
    gc.freeze()  # vLLM collects garbage again and again, and thaws what is frozen
    gc.freeze = gc.unfreeze = lambda: None
    sys.exit(child.main(*arguments))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("check", [check.name for check in CHECKS])
def test_a_check_on_cpu(check, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(runner, "_run", run_forked)
    code = command.main(["--device", "cpu", "--only", check, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/report.json")
    results = {c["name"]: c for c in json.loads(path.read_text())["checks"]}
    result = results[check]
    assert code == 0, result
    assert result["status"] == ("skipped" if check in SKIPPED else "passed"), result
    assert check in SKIPPED or any(f["ok"] is not None for f in result["figures"])
