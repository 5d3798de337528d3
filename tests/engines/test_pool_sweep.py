"""Whole runs in which engines are killed and stopped: they go on, or end with the engine's name."""

import json
import random
from importlib.util import find_spec

import forked
import pool_run
import pytest
import torch

pytestmark = pytest.mark.slow
ROUNDS = 6
SAME = ("drawn", "weights", "validations", "counters")
PHASES = {"sync": range(6), "validation": range(1, 6), "rollout": range(1, 6)}
"""The turns of each phase in which a fault may fall: every engine is busy in them."""


def run(tmp_path, *wanted, timeout):
    process = forked.run(pool_run.runs, str(tmp_path), *wanted, timeout=timeout)
    assert process.returncode == 0, process.stdout + process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines() if line[:1] == "{"]
    for result, (_, engines, _, _) in zip(results, wanted, strict=True):
        assert not result["left"], "no process is left"
        names = [f"The process of engine {i} of {engines} d" for i in range(engines)]
        told = [sum(name in text for text in result["warnings"]) for name in names]
        assert result["restarts"] in (told, [0])
    return results


def check_same(others, alone, wanted, names):
    """Check that all faults fell, and that each run has what the undisturbed one has."""
    ids = [name for drawn in alone["drawn"] for name, index, *_ in drawn if not index]
    assert len(ids) == len({*ids}) == 6 * len(alone["drawn"])
    for other, (_, _, faults, _) in zip(others, wanted, strict=True):
        assert other["fallen"] == [*range(len(faults))], faults
        assert sum(other["restarts"]) == len(faults)
        assert {n: other[n] for n in names} == {n: alone[n] for n in names}, faults


def some_faults(engines, seed):
    """One in each phase with each signal, and one in the last round."""
    chance = random.Random(seed)
    kinds = [(phase, how) for phase in PHASES for how in ("SIGKILL", "SIGSTOP")]
    versions = [chance.randint(phase == "validation", ROUNDS - 1) for phase, _ in kinds]
    faults = [
        [chance.randrange(engines), version, phase, chance.choice(PHASES[phase]), how]
        for version, (phase, how) in zip(versions, kinds, strict=True)
    ]
    last = [chance.randrange(engines), ROUNDS - 1, "rollout", chance.choice(PHASES["rollout"])]
    return [*faults, [*last, chance.choice(["SIGKILL", "SIGSTOP"])]]


def test_engines_that_are_killed_and_stopped_change_nothing(tiny_model, tmp_path):
    numbers = (2, 0), (2, 1), (3, 2)
    wanted = [(tiny_model, engines, some_faults(engines, seed), {}) for engines, seed in numbers]
    alone, *others = run(tmp_path, (tiny_model, 1, [], {}), *wanted, timeout=280)
    check_same(others, alone, wanted, ("drawn", "weights", "validations", "counters"))


def test_gradients_stream_while_engines_are_killed_and_stopped(exact_model, tmp_path):
    """The update is the same up to rounding."""
    faults = [[2, 1, "rollout", 3, "SIGKILL"], [0, 2, "rollout", 2, "SIGSTOP"]]
    more = {"rounds": 4, "precision": "64-true"}
    wanted = [(exact_model, 3, faults, {**more, "streamed": True})]
    alone, streamed = run(tmp_path, (exact_model, 1, [], more), *wanted, timeout=120)
    assert streamed["streamed"] > 0
    check_same([streamed], alone, wanted, ("drawn", "counters"))
    weights = [torch.load(tmp_path / name / "weights.pt") for name in "01"]
    assert torch.allclose(*weights, rtol=0, atol=1e-10)


def test_an_engine_that_dies_again_and_again_is_named(tiny_model, tmp_path):
    faults = [[1, 2, "start", 0, "SIGKILL"]]
    (result,) = run(tmp_path, (tiny_model, 3, faults, {}), timeout=120)
    assert len(result["drawn"]) == 2
    assert result["error"].startswith("The process of engine 1 of 3 died of SIGKILL, 3 times in a")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_one_of_two_vllm_engines_is_killed(tiny_model, tmp_path):
    more = {"engine": "VLLMEngine", "rounds": 3}
    faults = [[1, 1, "rollout", 5, "SIGKILL"], [0, 2, "validation", 3, "SIGSTOP"]]
    whole, hurt = run(
        tmp_path,
        (tiny_model, 2, [], more),
        (tiny_model, 2, faults, more),
        timeout=280,
    )
    assert hurt["restarts"] == [1, 1]
    assert hurt["drawn"][0] == whole["drawn"][0]
    names = [[[name, index] for name, index, *_ in drawn] for drawn in whole["drawn"]]
    assert [[[name, index] for name, index, *_ in drawn] for drawn in hurt["drawn"]] == names
    assert hurt["difference"] < 1e-4
