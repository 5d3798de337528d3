import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_drop_in():
    shown = run("examples/drop_in.py", "--rounds", "1", "--engine", "transformers")
    line = shown.splitlines()[-1]
    pattern = r"drop_in: reward ([\d.]+), held-out accuracy ([\d.]+) after 1 optimizer steps"
    reward, accuracy = map(float, re.fullmatch(pattern, line).groups())
    assert 0.2 < reward < 0.6 and 0.2 < accuracy < 0.6
