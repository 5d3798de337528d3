"""Every process of a run is killed and stopped in every phase, and the run comes to its end."""

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path

import faulty_run
import forked
import psutil
import pytest
import torch
from faulty_run import PHASES, SIGNALS, STEPS

pytestmark = pytest.mark.slow
needs_workers = pytest.mark.skipif(
    find_spec("vllm") is None or len(os.sched_getaffinity(0)) < 2,
    reason="needs vLLM and two cores",
)


def run(folder, engine, model, *strikes):
    """The figures of a run in which each strike fell, and that left nothing behind."""
    process = forked.run(faulty_run.runs, str(folder), engine, model, *strikes, timeout=1500)
    assert process.returncode == 0, process.stdout + process.stderr
    assert len([*folder.glob("struck *")]) == len(strikes), process.stderr
    figures = json.loads(process.stdout.splitlines()[-1])
    assert figures["steps"] == STEPS[engine]
    assert figures.pop("difference") < 1e-4, "all is drawn with the weights of its round"
    check_nothing_left(folder)
    return figures


def check_nothing_left(folder):
    """No process of the run, and nothing that one of them had in `/dev/shm`."""
    records = [json.loads(line) for line in (folder / "processes").read_text().splitlines()]
    end = time.monotonic() + 60
    while left := {
        *[pid for pid, created, _ in records if runs(pid, created)],
        *[name for *_, names in records for name in names if Path("/dev/shm", name).exists()],
    }:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def runs(pid, created):
    """Whether that process, and not a later one of its number, is there and no zombie."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failures(figures):
    """Reward calls that gave no score, by what the run counted."""
    names = ("crashes", "timeouts", "errors")
    return sum(n for name, n in figures["counters"].items() if name.rpartition("/")[2] in names)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return run(folder, "TransformersEngine", tiny_model), torch.load(folder / "weights.pt")


@pytest.mark.parametrize("who", ["engine", "trainer", "reward"])
@pytest.mark.timeout(1800)
def test_a_process_is_struck_in_every_phase(who, whole, tiny_model, tmp_path):
    """The strikes of one process, one in a round; a killed trainer is resumed."""
    undisturbed, weights = whole
    folder = tmp_path / "run"
    strikes = [f"{who} {how} {phase}" for phase in PHASES for how in SIGNALS]
    if who == "reward":
        strikes.remove(
            "reward STOP start"
        )  # the engine starts once, and in a sync it waits as well
    figures = run(folder, "TransformersEngine", tiny_model, *strikes)
    for tokens in figures["tokens"]:
        assert all(tokens)
    if who == "trainer":
        assert figures == undisturbed
    if who == "engine":
        assert figures["restarts"] == len(strikes)
        assert figures["tokens"] == undisturbed["tokens"]
        assert figures["counters"] == undisturbed["counters"]
        assert torch.allclose(torch.load(folder / "weights.pt"), weights, atol=1e-5)
    if who == "reward":
        assert figures["restarts"] == 0
        assert failures(figures) > 0 or figures["weights"] == undisturbed["weights"]


@needs_workers
@pytest.mark.timeout(1800)
def test_a_worker_of_vllm_is_struck(tiny_model, tmp_path):
    strikes = ["worker KILL rollout", "worker STOP rollout"]
    figures = run(tmp_path / "run", "VLLMEngine", tiny_model, *strikes)
    assert figures["restarts"] == 2
