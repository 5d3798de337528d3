"""Weights from GPU to GPU to engines in processes of their own, which play their GPUs."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from played_gpus import PlayedGPUs, perturb, play_trainer

from lit_rlsched.engines import ProcessEngine, weight_transfer
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.settings import RunFailed
from lit_rlsched.training.weight_sync import WeightSync
from lit_rlsched.types import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
PROBE = [Prompt("a", "", (5, 14, 6)), Prompt("b", "", (18, 33))]


@pytest.fixture
def deadly(tmp_path):
    return tmp_path / "deadly"


@pytest.fixture
def start(tiny_model, tiny_policy, deadly, monkeypatch):
    """Start engines; returns them, and their sync, which compares log-probs."""
    play_trainer(monkeypatch)
    small = partial(weight_transfer.buckets, limit=60_000)
    monkeypatch.setattr(weight_transfer, "buckets", small)
    started = []

    def start(kind, count):
        first = 1 if kind == "nccl" else 0
        device = torch.device("cuda", 0)
        spec = EngineSpec(tiny_model, 4 * count, 128, (), device=device, first_gpu=first)
        engine = ProcessEngine(PlayedGPUs(str(deadly)), weight_transfer=kind)
        engine = engine if count == 1 else EnginePool.of(engine, count)
        started.append(engine)
        engine.start(spec)
        return engine, WeightSync(engine, spec, tiny_policy, probe=PROBE)

    yield start
    for engine in started:
        engine.close()


def synced(sync, policy, version):
    perturb(policy)
    return sync(version)["sync/max_logp_diff"] < 1e-3


def test_nccl(start, tiny_policy, deadly):
    engine, sync = start("nccl", 2)
    assert synced(sync, tiny_policy, 1) and synced(sync, tiny_policy, 2)
    deadly.write_text("1 SIGKILL")  # in the middle of a sync
    with pytest.raises(RunFailed, match=r"engine 1 of 2 died of SIGKILL.* keeps no copy"):
        synced(sync, tiny_policy, 3)
    assert [each.restarts for each in engine.engines] == [0, 0]


def test_ipc(start, tiny_policy):
    _, sync = start("ipc", 1)
    assert synced(sync, tiny_policy, 1) and synced(sync, tiny_policy, 2)


def test_an_engine_on_a_gpu_where_nobody_trains(start, tiny_policy):
    _, sync = start("ipc", 2)
    with pytest.raises(
        ValueError, match=r"no rank of the trainer is on GPU-1, the GPU of engine 1"
    ):
        sync(1)
