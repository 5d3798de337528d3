"""On a machine with vLLM's build for GPUs the tests of the other one are skipped."""

import pytest
import vllm_build

TESTS = f"""
import pytest
REFUSAL = "`VLLMEngine`: {vllm_build.REFUSAL} cuda."

@pytest.fixture
def engine():
    raise ValueError(REFUSAL)

def test_starts_one():
    raise ValueError(REFUSAL)

def test_has_one(engine): ...

@pytest.mark.parametrize("name", ["VLLMEngine", "other"])
def test_runs_one(name):
    assert name == "other"

def test_fails():
    raise ValueError("for another reason")
"""


@pytest.mark.parametrize(
    ("for_cpu", "outcomes"),
    [
        (True, {"failed": 3, "errors": 1, "passed": 1}),
        (False, {"failed": 1, "skipped": 3, "passed": 1}),
    ],
)
def test_they_say_so_and_are_skipped(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    for_cpu: bool,
    outcomes: dict[str, int],
) -> None:
    monkeypatch.setattr(vllm_build, "for_cpu", lambda: for_cpu)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "vllm_build", "-p", "no:xdist", "-rs")
    result.assert_outcomes(**outcomes)
    if not for_cpu:
        assert vllm_build.REASON in result.stdout.str()
