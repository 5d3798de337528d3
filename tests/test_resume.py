"""Kill a run with SIGKILL wherever it hurts, resume it, and compare with a run never stopped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("resumable_run.py")

PLACES = [
    "step 1",  # in the middle of a round, between two of its optimizer steps
    "completion 40",  # while the third round is drawn
    "step 4",  # at the start of a round: its completions are drawn, nothing of it is trained on
    "validation 3",  # in the third validation
    "round_end 3",  # all drawn, advantages set
    "step 7",
]


def run(folder, engine, model, die="never"):
    process = subprocess.run(
        [sys.executable, SCRIPT, str(folder), engine, model, die],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if die != "never":
        assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr
        return None
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("engine", "places"),
    [("TransformersEngine", PLACES), ("VLLMEngine", ["completion 40", "validation 3", "step 7"])],
)
def test_killed_anywhere_and_resumed_equals_never_stopped(engine, places, tiny_model, tmp_path):
    whole = run(tmp_path / "whole", engine, tiny_model)
    for place in places:
        run(tmp_path / "killed", engine, tiny_model, place)
    resumed = run(tmp_path / "killed", engine, tiny_model)
    assert resumed["weights"] == whole["weights"]
    assert resumed == whole
    assert whole["num_completions"] == whole["rounds"] * 16
    assert len(whole["uids"]) == len(set(whole["uids"])) == whole["rounds"] * 4
