"""Runs with several ranks, each a fork of a process that has done the imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path, tiny_model):
    """Run several runs in one process that forks their ranks; returns a result for each."""

    def run(*runs, model=tiny_model):
        paths = os.pathsep.join([str(TESTS), *sys.path])
        done = subprocess.run(
            [sys.executable, str(TESTS / "ranks/ranked_run.py"), str(tmp_path)],
            input=json.dumps([{"model": model, "name": str(i), **r} for i, r in enumerate(runs)]),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads(done.stdout)
        for result in results:
            result["ranks"] = [
                json.loads(path.read_text())
                for path in sorted(tmp_path.glob(f"{result['name']}.*.json"))
            ]
            path = tmp_path / f"{result['name']}.pt"
            result["weights"] = torch.load(path) if path.exists() else None
        return results

    return run
