"""The checks themselves, on CPU with tiny limits: they run, and what needs a GPU is skipped."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu_check.checks import CHECKS

SKIPPED = {"environment", "tiny-fp32-graphs", "tiny-bf16-graphs", "sleep-cycles"}
if len(os.sched_getaffinity(0)) < 2:
    SKIPPED.add("two-devices")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("check", [check.name for check in CHECKS])
def test_a_check_on_cpu(check, tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--only", check]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    (path,) = tmp_path.glob("*/report.json")
    results = {c["name"]: c for c in json.loads(path.read_text())["checks"]}
    result = results[check]
    assert done.returncode == 0, (result, done.stdout)
    assert result["status"] == ("skipped" if check in SKIPPED else "passed"), result
    assert check in SKIPPED or any(f["ok"] is not None for f in result["figures"])
