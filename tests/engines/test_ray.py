"""Engines in Ray actors: which cluster it is, what it must have, and what goes wrong.

What they draw, and what happens when one dies, is
tested with the engines in child processes: `tests/rollout/test_remote.py`,
`test_pool_processes.py`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import jsonschema
import psutil
import pytest
import torch
import yaml
from placements import on_ray

import lit_rlsched
from lit_rlsched import GRPOModule
from lit_rlsched.engines import (
    ProcessEngine,
    RayEngine,
    SimulatedEngine,
    TransformersEngine,
    VLLMEngine,
)
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.ray_engine import ActorChild, connect
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.weights import ObjectStore
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling

SPEC = EngineSpec("", 2, 448, (1,))
ROOT = Path(__file__).parents[2]


def in_cluster(test):
    for mark in on_ray:
        test = mark(test)
    return test


def test_ray_is_imported_in_functions_alone():
    """It is an extra, and takes seconds."""
    files = [*Path(lit_rlsched.__file__).parent.rglob("*.py")]
    assert any("    import ray\n" in file.read_text() for file in files)
    for file in files:
        assert not re.search(r"^(import|from) ray\b", file.read_text(), re.MULTILINE), file


@pytest.mark.parametrize("installed", [None, "2.9.3", "3.0.0.dev0"])
def test_a_ray_that_is_missing_or_too_old_is_refused(monkeypatch, installed):
    ray = None
    if installed is not None:
        ray = ModuleType("ray")
        ray.__version__, ray.is_initialized = installed, lambda: pytest.fail("new enough")
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = RayEngine(SimulatedEngine())
    if installed == "3.0.0.dev0":
        with pytest.raises(pytest.fail.Exception, match="new enough"):
            engine.start(SPEC)
        return
    told = "needs Ray: pip install" if installed is None else "needs Ray 2.59 .* 2.9.3 is installed"
    with pytest.raises(UsageError, match=told):
        engine.start(SPEC)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Addresses that `ray.init` was given, which connects nothing and takes SIGTERM."""
    asked = []
    ray = ModuleType("ray")
    ray.__version__, ray.is_initialized = "2.60.0", lambda: False

    def init(address, logging_level):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        asked.append(address)

    ray.init = init
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return asked


@pytest.mark.parametrize("where", ["variable", "file", "both", "somebody's file", "nowhere"])
def test_the_cluster_is_the_users(monkeypatch, tmp_path, asked, where):
    (tmp_path / "ray").mkdir()
    if where in ("variable", "both"):
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    if where not in ("variable", "nowhere"):
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379\n")
    if where == "somebody's file":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    handler = signal.getsignal(signal.SIGTERM)
    if where in ("somebody's file", "nowhere"):
        with pytest.raises(UsageError, match="has started no Ray cluster on this node"):
            connect()
    else:
        connect()
    there = {"variable": ["head:6379"], "both": ["head:6379"], "file": ["127.0.0.1:6379"]}
    assert asked == there.get(where, [])
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", ":6379", "local"])
def test_an_address_that_is_none_is_refused(monkeypatch, asked, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=f"`RAY_ADDRESS={address}`: expected `HOST:PORT`"):
        connect()
    assert asked == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Version mismatch: started with:\n    Ray: 2.59.0", "Version .* with: Ray: 2.59.0"),
        ("Failed. Traceback:\n  line 1\nray.AuthenticationError: Wrong token.", "Wrong token"),
        ("Timed out while waiting for GCS to become available.", "Timed out"),
    ],
)
def test_a_cluster_that_is_gone_or_has_another_ray_or_token_is_refused(
    monkeypatch, asked, said, told
):
    def init(address, **options):
        raise ConnectionError("failed") from RuntimeError(said)

    monkeypatch.setattr(sys.modules["ray"], "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    told = rf"at head:6379 accepts the trainer: {told}.* Run .* versions of Ray and"
    with pytest.raises(UsageError, match=told):
        connect()


def test_the_script_of_slurm_is_bash_and_asks_for_one_task_on_a_node():
    script = ROOT / "examples/cluster/slurm_ray.sh"
    subprocess.run(["bash", "-n", script], check=True)
    options = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    assert "--ntasks-per-node=1" in options and os.access(script, os.X_OK)


def test_the_file_of_the_cluster_launcher_is_what_ray_expects():
    ray = pytest.importorskip("ray")
    config = yaml.safe_load((ROOT / "examples/cluster/ray_up.yaml").read_text())
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    for role in ("head", "worker"):
        *_, start = config[f"{role}_start_ray_commands"]
        assert "RAY_AUTH_MODE=token" in start


@in_cluster
def test_a_cluster_without_the_resources_is_refused_with_what_is_missing():
    began = time.monotonic()
    engine = RayEngine(SimulatedEngine(), {"CPU": 1, "TPU": 4}, timeout=1)
    with pytest.raises(RuntimeError, match=r"no room for 1 x 1 CPU [+] 4 TPU after 1 s") as error:
        engine.start(SPEC)
    pool = EnginePool.of(RayEngine(SimulatedEngine(), {"CPU": 3}, timeout=1), 2)
    with pytest.raises(RuntimeError, match="no room for 2 x 3 CPU after"):
        pool.start(SPEC)
    assert time.monotonic() - began < 50
    assert isinstance(error.value, UsageError) and bundles() == []


def bundles():
    """Bundles of resources that are reserved."""
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    return [b for g in groups if g["state"] != "REMOVED" for b in g["bundles"].values()]


@in_cluster
def test_each_of_two_engines_has_a_bundle_until_both_are_closed():
    pool = EnginePool.of(RayEngine(SimulatedEngine(), {"CPU": 1.5}), 2)
    pool.start(SPEC)
    assert bundles() == [{"CPU": 1.5}] * 2
    first, second = pool.engines
    first.close()
    assert second.stats().running == 0
    assert len(bundles()) == 2
    pool.close()
    assert bundles() == []


@in_cluster
def test_a_node_with_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("lit_rlsched.engines.ray_engine.__version__", "9.9")
    engine = RayEngine(SimulatedEngine())
    with pytest.raises(RuntimeError, match=r"has lit-rlsched .*, and the trainer 9[.]9") as error:
        engine.start(SPEC)
    assert isinstance(error.value, UsageError) and engine.restarts == 0 and bundles() == []


@in_cluster
def test_an_actor_that_does_not_start_is_refused_with_its_node(monkeypatch):
    monkeypatch.setattr("lit_rlsched.engines.ray_engine.STARTUP", 0.001)
    began = time.monotonic()
    engine = RayEngine(SimulatedEngine())
    told = r"an actor on node \w{8} \([\d.]+\) of the Ray cluster does not start within 0.001 s"
    with pytest.raises(RuntimeError, match=told) as error:
        engine.start(SPEC)
    assert isinstance(error.value, UsageError) and engine.restarts == 0 and bundles() == []
    assert time.monotonic() - began < 9, "what was told nothing is not waited for"


@in_cluster
def test_weights_go_through_the_store_in_objects_of_limited_size(monkeypatch):
    monkeypatch.setattr("lit_rlsched.engines.weights.STORED", 100)
    weights = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.randn(30, 2).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "transposed": torch.arange(6).reshape(2, 3).T,
    }
    store = ObjectStore()
    handed = store.write(weights.items())
    assert [len(index) for _, index in handed.buckets] == [1, 1, 2]
    for (name, read), (same, written) in zip(handed, weights.items(), strict=True):
        assert name == same and read.dtype == written.dtype
        assert torch.equal(read, written)
    rounded = dict(store.write(weights.items(), torch.bfloat16))
    assert rounded["a"].dtype == torch.bfloat16
    assert handed.buckets == [], "the old objects are free"
    store.close()


@in_cluster
def test_it_comes_back_and_is_closed_twice():
    engine = RayEngine(SimulatedEngine())
    for _ in range(2):
        engine.start(SPEC)
        assert [engine.stats().running for _ in range(20)] == [0] * 20
        engine.close()
        engine.close()
    with pytest.raises(RuntimeError, match="closed or was not started"):
        engine.stats()


@in_cluster
@pytest.mark.skipif(
    find_spec("vllm") is None or len(os.sched_getaffinity(0)) < 2,
    reason="needs vLLM and two cores",
)
def test_vllm_split_over_two_processes_in_an_actor_draws_the_same(tiny_model, tiny_policy):
    """As in a child process, not split. The two processes end with their actor."""
    drawn = []
    split = RayEngine(VLLMEngine(tensor_parallel_size=2), {"CPU": 2})
    for engine in (ProcessEngine(VLLMEngine()), split):
        engine.start(EngineSpec(tiny_model, 4, 128, (1,), policy=tiny_policy))
        engine.sync_weights(tiny_policy.named_parameters(), 1)
        worker = engine.make_worker(Admission(4))
        worker.start_trace()
        worker.start_round(ahead=True)
        worker.submit(Request(f"r{i}", range(4, 24), i, Sampling(40)) for i in range(12))
        events = []
        while worker.busy:
            events += worker.step()
        drawn.append([(event.request_id, event.token_ids, event.logprobs) for event in events])
        children = psutil.Process(engine.pid).children(recursive=True)
        workers = [p for p in children if "resource_tracker" not in " ".join(p.cmdline())]
        if engine is split:
            os.kill(engine.pid, signal.SIGKILL)
            assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=60)[1], children
        engine.close()
    assert len({name for name, *_ in drawn[0]}) == 12
    for one, other in zip(*drawn, strict=True):
        assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], abs=1e-5)


@in_cluster
def test_a_run_with_two_actors_is_the_run_with_two_child_processes(fit, tiny_model):
    weights = []
    for placement in (ProcessEngine, RayEngine):
        module = GRPOModule(tiny_model, learning_rate=1e-3)
        _, module, data = fit(module, engine=placement(TransformersEngine()), num_engines=2)
        assert all(isinstance(engine, placement) for engine in data.run.settings.engine.engines)
        weights.append({name: weight.clone() for name, weight in module.state_dict().items()})
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


class Later(TransformersEngine):
    """Its node has been up for less time than the trainer's, as its clock says."""

    def now(self):
        return super().now() - 5000


@in_cluster
def test_an_engine_on_another_node_tells_times_of_the_trainers_clock(
    monkeypatch, tiny_model, tiny_policy
):
    monkeypatch.setattr(ActorChild, "is_here", False)
    engine = RayEngine(Later())
    began = time.monotonic()
    engine.start(EngineSpec(tiny_model, 2, 64, (1,), policy=tiny_policy))

    def trace_of_a_round(version):
        engine.sync_weights(tiny_policy.named_parameters(), version)
        worker = engine.make_worker(Admission(2))
        trace = worker.start_trace()
        worker.start_round(ahead=False)
        worker.submit([Request("r", range(4, 24), 0, Sampling(8))])
        while worker.busy:
            worker.step()
        return trace

    for version in (1, 2):
        trace = trace_of_a_round(version)
        assert began < trace.origin < trace.origin + max(trace.steps["end"]) < time.monotonic()
        began = trace.origin
        if version == 1:  # the one that takes its place knows the difference too
            os.kill(engine.pid, signal.SIGKILL)
    engine.close()
