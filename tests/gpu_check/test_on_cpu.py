"""The checks themselves, on CPU with tiny limits: they run, and what needs a GPU is skipped."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu_check.checks import CHECKS

FIRST_OF_EACH = {check.function: check.name for check in reversed(CHECKS)}
"""A check for each function: others call it with another precision or size."""
SKIPPED = {"environment", "sleep-cycles", "two-devices"}
"""Checks that a CPU may skip; the last one only where there is a single core."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("check", FIRST_OF_EACH.values())
def test_a_check_on_cpu(check, tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--only", check]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    (path,) = tmp_path.glob("*/report.json")
    results = {c["name"]: c for c in json.loads(path.read_text())["checks"]}
    result = results[check]
    assert result["status"] != "failed" and done.returncode == 0, (result, done.stdout)
    assert result["status"] == "passed" or check in SKIPPED
    assert result["status"] == "skipped" or any(f["ok"] is not None for f in result["figures"])
