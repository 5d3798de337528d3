"""The checks themselves, on CPU with tiny limits: they run, and what needs a GPU is skipped."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SKIPPED = ["environment", "tiny-fp32-graphs", "tiny-bf16-graphs", "sleep-cycles"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_all_checks_on_cpu(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    (path,) = tmp_path.glob("*/report.json")
    checks = {check["name"]: check for check in json.loads(path.read_text())["checks"]}
    failed = {n: (c["why"], c["error"]) for n, c in checks.items() if c["status"] == "failed"}
    assert failed == {} and done.returncode == 0, done.stdout
    skipped = {n for n, c in checks.items() if c["status"] == "skipped"} - {"two-devices"}
    assert skipped == set(SKIPPED)
    judged = {n: sum(f["ok"] is not None for f in c["figures"]) for n, c in checks.items()}
    assert all(judged[name] for name in judged if name not in (*SKIPPED, "two-devices"))
