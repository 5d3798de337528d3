"""The checks themselves, on CPU with tiny limits: they run, and what needs a GPU is skipped.

`test_runner.py` tests the processes of the checks. Here they are forks.
"""

import json
import multiprocessing
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import forked
import forked_engines
import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import child, runner, runs
from benchmarks.gpu_check.checks import CHECKS

SKIPPED = {"environment", "tiny-fp32-graphs", "tiny-bf16-graphs", "sleep-cycles"}
SKIPPED |= {check.name for check in CHECKS if check.name.startswith("transfer-")}
if len(os.sched_getaffinity(0)) < 2:
    SKIPPED.add("two-devices")


class Fork:
    """`python -m lit_rlsched` in place of `subprocess.Popen`."""

    def __init__(self, command):
        arguments = command[command.index("lit_rlsched") + 1 :]
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=forked.command_line, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode


def run_command(command, check):
    assert Fork(command).wait() == 0


def run_check(*arguments):
    forked_engines.begin()
    runs.subprocess = SimpleNamespace(run=run_command, Popen=Fork)
    return child.main(*arguments)


def run_forked(command, limit, output, environment):
    """In place of `runner._run`."""
    done = forked.run(run_check, *command[3:], timeout=limit, environment=environment)
    output.write(done.stdout + done.stderr)
    return done.returncode


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
