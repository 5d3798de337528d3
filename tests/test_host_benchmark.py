"""What a decode step costs beside the model, on real vLLM."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count otherwise"),
]


def test_a_steps_parts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import common

    monkeypatch.setattr(common, "ENVIRONMENT", {})
    from benchmarks import counts, host

    host.make_model(str(tmp_path))
    counted = host.measure(str(tmp_path), running=32, limit=8, rounds=1, count=True)
    recorded = json.loads(counts.RECORDED.read_text())
    lines, worse = counts.compare(counts.instructions(counted, 32), recorded)
    assert not worse, lines
    assert counted["vLLM: schedule"] > 0 < counted["vLLM: model"]
    assert counted["vLLM: outputs"] == 0, "vLLM's front end makes objects of every token"
    timed = host.measure(str(tmp_path), running=32, limit=8, rounds=1)
    assert timed.keys() == counted.keys()
