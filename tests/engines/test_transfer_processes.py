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


def test_two_engines_get_the_weights_and_one_that_dies_ends_the_run(
    tiny_model, tiny_policy, tmp_path, monkeypatch
):
    play_trainer(monkeypatch)
    small = partial(weight_transfer.buckets, limit=60_000)
    monkeypatch.setattr(weight_transfer, "buckets", small)
    device, deadly = torch.device("cuda", 0), tmp_path / "deadly"
    spec = EngineSpec(tiny_model, 8, 128, (), device=device, first_gpu=1)
    pool = EnginePool.of(ProcessEngine(PlayedGPUs(str(deadly)), weight_transfer="nccl"), 2)
    pool.start(spec)
    try:
        sync = WeightSync(pool, spec, tiny_policy, probe=PROBE)
        for version in range(2):
            perturb(tiny_policy)
            assert sync(version)["sync/max_logp_diff"] < 1e-3
        deadly.write_text("1 SIGKILL")  # in the middle of a sync
        with pytest.raises(RunFailed, match=r"engine 1 of 2 died of SIGKILL.* keeps no copy"):
            sync(2)
        assert [engine.restarts for engine in pool.engines] == [0, 0]
    finally:
        pool.close()
