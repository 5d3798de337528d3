"""Runs with several ranks, each a fork of a process that has done the imports."""

import json
from pathlib import Path

import forked
import pytest
import torch


@pytest.fixture
def run(tmp_path, tiny_model):
    """Run several runs in one process that forks their ranks; returns a result for each."""

    def run(*runs, model=tiny_model):
        given = json.dumps([{"model": model, "name": str(i), **r} for i, r in enumerate(runs)])
        path = str(Path(__file__).with_name("ranked_run.py"))
        done = forked.run(forked.script, path, given, str(tmp_path), timeout=1500)
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
