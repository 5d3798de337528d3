"""Engines in Ray actors: what the cluster must have, what goes wrong, and what is left behind.

What they draw, and what happens when one dies, is tested with the engines in child processes:
`tests/rollout/test_remote.py`, `test_pool_processes.py`.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from importlib.util import find_spec
from types import ModuleType

import psutil
import pytest
import torch
from placements import on_ray

from lit_rlsched import GRPOModule
from lit_rlsched.engines import (
    ProcessEngine,
    RayEngine,
    SimulatedEngine,
    TransformersEngine,
    VLLMEngine,
    _ray_cluster,
    shared_weights,
)
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.refusals import is_refusal
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.types import Request, Sampling

SPEC = EngineSpec("", 2, 448, (1,))


def in_cluster(test):
    for mark in on_ray:
        test = mark(test)
    return test


def test_ray_is_not_imported_with_the_package():
    code = "import sys, lit_rlsched.cli, lit_rlsched.engines.ray_engine as _; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lit_rlsched.engines.ray_engine" in run.stdout.split()
    assert "ray" not in run.stdout.split()


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
    with pytest.raises(ImportError, match=told) as error:
        engine.start(SPEC)
    assert is_refusal(error.value)


@pytest.mark.parametrize("where", ["variable", "file", "local", "nowhere"])
def test_the_cluster_is_the_users_or_one_of_its_own(monkeypatch, tmp_path, where):
    asked = []
    ray = ModuleType("ray")
    ray.__version__, ray.is_initialized = "2.60.0", lambda: False
    ray.init = lambda *address, **options: asked.append((address, options))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    monkeypatch.setattr(_ray_cluster, "_local", False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    if where in ("variable", "local"):
        monkeypatch.setenv("RAY_ADDRESS", {"variable": "10.0.0.1:6379"}.get(where, where))
    if where == "file":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    started = _ray_cluster.connect(cpus=999.5)
    ((address, options),) = asked
    assert started == (where in ("local", "nowhere"))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    if started:
        assert address == ("local",) and options["num_cpus"] == 1000
        assert options["include_dashboard"] is False
    else:
        assert address == () and [*options] == ["logging_level"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"resources": {"GPU": 2}}, "`tensor_parallel_size`"),
        ({"resources": {"CPU": 0}}, "must be above 0"),
        ({"resources": {"CPU": float("nan")}}, "must be above 0"),
        ({"timeout": 0}, r"`RayEngine\(timeout=0\)`"),
        ({"timeout": float("inf")}, r"`RayEngine\(timeout=inf\)`"),
        ({"engine": ProcessEngine(SimulatedEngine())}, "one process is enough"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        RayEngine(**{"engine": SimulatedEngine(), **settings})


@in_cluster
def test_a_cluster_without_the_resources_is_refused_with_what_is_missing():
    began = time.monotonic()
    engine = RayEngine(SimulatedEngine(), {"CPU": 1, "TPU": 4}, timeout=1)
    with pytest.raises(RuntimeError, match=r"no room for 1 x 1 CPU [+] 4 TPU after 1 s") as error:
        engine.start(SPEC)
    assert "its 1 nodes have 4 CPU + 0 TPU in all, which is enough for 0" in str(error.value)
    pool = EnginePool.of(RayEngine(SimulatedEngine(), {"CPU": 3}, timeout=1), 2)
    with pytest.raises(RuntimeError, match=r"no room for 2 x 3 CPU .* enough for 1[.]"):
        pool.start(SPEC)
    assert time.monotonic() - began < 50
    assert is_refusal(error.value) and bundles() == []


@in_cluster
def test_resources_that_others_use_are_told():
    one = RayEngine(SimulatedEngine(), {"CPU": 3})
    one.start(SPEC)
    try:
        with pytest.raises(RuntimeError, match=r"others use it \(1 CPU are free\)"):
            RayEngine(SimulatedEngine(), {"CPU": 2}, timeout=1).start(SPEC)
    finally:
        one.close()


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
    assert is_refusal(error.value) and engine.restarts == 0 and bundles() == []


@in_cluster
def test_it_comes_back_on_other_devices_and_is_closed_twice():
    engine = RayEngine(SimulatedEngine())
    for _ in range(2):
        engine.start(SPEC)
        assert engine.stats().running == 0
        engine.close()
        engine.close()
    with pytest.raises(RuntimeError, match="closed or was not started"):
        engine.stats()


@in_cluster
def test_weights_go_through_the_store_in_objects_of_limited_size(monkeypatch):
    monkeypatch.setattr(shared_weights, "BUCKET", 100)
    weights = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.randn(30, 2).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "transposed": torch.arange(6).reshape(2, 3).T,
    }
    store = shared_weights.ObjectStore()
    handed = store.write(weights.items())
    assert [len(index) for _, index in handed.buckets] == [2, 2]
    for (name, read), (same, written) in zip(handed, weights.items(), strict=True):
        assert name == same and read.dtype == written.dtype
        assert torch.equal(read, written)
    rounded = dict(store.write(weights.items(), torch.bfloat16))
    assert rounded["a"].dtype == torch.bfloat16
    assert handed.buckets == [], "the old objects are free"
    store.close()


@in_cluster
def test_a_stream_that_ends_is_followed_by_another(monkeypatch):
    monkeypatch.setattr("lit_rlsched.engines._ray_actor.STREAM", 3)  # sent with the class
    engine = RayEngine(SimulatedEngine())
    engine.start(SPEC)
    assert [engine.stats().running for _ in range(20)] == [0] * 20
    engine.close()


@in_cluster
def test_ray_takes_no_signal_and_talks_to_this_machine_only():
    handler = signal.getsignal(signal.SIGTERM)
    assert not str(getattr(handler, "__module__", "")).startswith("ray")
    engine = RayEngine(SimulatedEngine())
    engine.start(SPEC)
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    peers, commands = [], []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a zombie or one that has just ended
            peers += [s.raddr.ip for s in process.net_connections("inet") if s.raddr]
            commands.append(process.cmdline())
    assert len(peers) > 5 and {ip.removeprefix("::ffff:") for ip in peers} <= own
    dashboards = [c for c in commands if any(a.endswith("dashboard/dashboard.py") for a in c)]
    assert all("--disable-frontend" in command for command in dashboards)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    engine.close()


@in_cluster
def test_an_engine_has_the_trainers_variables_and_ray_none_of_its_secrets(monkeypatch):
    class Reading(SimulatedEngine):
        @property
        def name(self):
            return repr(sorted(os.environ))

    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setenv("LOCAL_RANK", "3")
    engine = RayEngine(Reading())
    engine.start(SPEC)
    names = engine.child.call("engine", "__getattribute__", "name")
    assert "'MY_API_KEY'" in names and "'LOCAL_RANK'" not in names
    engine.close()


TRAINER = """
    import os, sys, psutil
    os.environ["RAY_ADDRESS"] = "local"
    os.environ["MY_API_KEY"] = "secret"
    from lit_rlsched.engines import RayEngine, SimulatedEngine
    from lit_rlsched.engines.base import EngineSpec
    engine = RayEngine(SimulatedEngine())
    engine.start(EngineSpec("", 2, 64, (1,)))
    children = psutil.Process().children(recursive=True)
    assert engine.pid in [child.pid for child in children]
    told = [child.pid for child in children if b"MY_API_KEY" in environment(child.pid)]
    print(told, *[child.pid for child in children], sep=";", flush=True)
    input()
    engine.close()
"""


@in_cluster
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ends"])
def test_a_cluster_of_its_own_ends_with_the_trainer(killed):
    read = "def environment(pid):\n    return open(f'/proc/{pid}/environ', 'rb').read()\n"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the paths of sockets must be short
        trainer = subprocess.Popen(
            [sys.executable, "-c", read + textwrap.dedent(TRAINER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_TMPDIR": folder},
        )
        told, *pids = trainer.stdout.readline().split(";")
        assert told == "[]" and len(pids) > 4
        if killed:
            trainer.kill()
        trainer.communicate("\n")
        while any(map(runs, pids)):
            time.sleep(0.1)
        assert killed or not os.listdir(folder)


def runs(pid):
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


USERS = """
    import os
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1, resources={"rollout": 2})
    os.environ["RAY_ADDRESS"] = cluster.address
    import warnings
    import ray, torch
    from lit_rlsched.engines import RayEngine, SimulatedEngine
    from lit_rlsched.engines.base import EngineSpec
    from lit_rlsched.engines.pool import EnginePool

    class Reading(SimulatedEngine):
        def sync_weights(self, named_tensors, version):
            self.sums = [(name, float(tensor.sum())) for name, tensor in named_tensors]

        @property
        def name(self):
            return ray.get_runtime_context().get_node_id(), self.sums

    pool = EnginePool.of(RayEngine(Reading(), {"CPU": 1}), 2)
    pool.start(EngineSpec("", 2, 64, (1,)))
    pool.sync_weights([("a", torch.ones(1000, 10)), ("b", torch.ones(3))], 1)
    asked = [engine.child.call("engine", "__getattribute__", "name") for engine in pool.engines]
    assert len({node for node, _ in asked}) == 2, "one engine on each node"
    assert [sums for _, sums in asked] == [[("a", 10000.0), ("b", 3.0)]] * 2
    pool.close()

    engine = RayEngine(Reading(), {"rollout": 1})
    engine.start(EngineSpec("", 2, 64, (1,)))
    engine.sync_weights([("a", torch.ones(5))], 1)
    cluster.add_node(num_cpus=1, resources={"rollout": 1})
    cluster.remove_node(other, allow_graceful=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not engine.restarts:  # the actor notices after a while
            assert engine.stats().running == 0
    assert "another one takes its place" in str(caught[-1].message), caught
    _, sums = engine.child.call("engine", "__getattribute__", "name")
    assert engine.restarts == 1 and sums == [("a", 5.0)]
    engine.close()
    ray.shutdown()
    ray.init(cluster.address)
    assert sum(node["Alive"] for node in ray.nodes()) == 2
    print("done")
"""


@in_cluster
def test_a_cluster_of_the_user_has_an_engine_on_each_node_and_goes_on_without_us():
    """Nodes are processes here. One of them dies with its engine, whose bundle moves on."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the paths of sockets must be short
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(USERS)],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "RAY_TMPDIR": folder},
        )
    assert run.stdout.splitlines()[-1:] == ["done"], run.stdout + run.stderr


@in_cluster
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_in_an_actor_draws_what_it_draws_in_a_child_process(tiny_model, tiny_policy):
    drawn = []
    for placement in (ProcessEngine, RayEngine):
        engine = placement(VLLMEngine())
        engine.start(EngineSpec(tiny_model, 4, 128, (1,), policy=tiny_policy))
        engine.sync_weights(tiny_policy.named_parameters(), 1)
        worker = engine.make_worker(Admission(4))
        worker.start_trace()
        worker.start_round(take_turns=True, ahead=True)
        worker.submit(Request(f"r{i}", range(4, 24), i, Sampling(40)) for i in range(12))
        events = []
        while worker.busy:
            events += worker.step()
        drawn.append([(event.request_id, event.token_ids, event.logprobs) for event in events])
        engine.close()
    assert len({name for name, *_ in drawn[0]}) == 12
    assert drawn[0] == drawn[1]


@in_cluster
def test_a_run_with_two_actors_is_the_run_with_two_child_processes(fit, tiny_model):
    weights = []
    for placement in (ProcessEngine, RayEngine):
        module = GRPOModule(tiny_model, learning_rate=1e-3)
        _, module, data = fit(module, engine=placement(TransformersEngine()), num_engines=2)
        assert all(isinstance(engine, placement) for engine in data.engine.engines)
        weights.append({name: weight.clone() for name, weight in module.state_dict().items()})
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
