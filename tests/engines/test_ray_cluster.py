"""The cluster of a `RayEngine`: which one it is, what is refused, what is left, several nodes.

No test stops Ray by name (`ray stop`): other clusters may run on this machine.
"""

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import yaml
from filelock import FileLock

from lit_rlsched.engines import RayEngine, SimulatedEngine, _ray_cluster
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.settings import UsageError

ROOT = Path(__file__).parents[2]
SPEC = EngineSpec("", 2, 448, (1,))
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
SLURM = "examples/cluster/slurm_ray.sh"


def slow(test):
    """In the same worker of the tests as those with a cluster; these have clusters of their own."""
    return pytest.mark.slow(pytest.mark.xdist_group("ray")(needs_ray(test)))


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
    with pytest.raises(UsageError, match=told) as error:
        engine.start(SPEC)
    assert isinstance(error.value, UsageError)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Arguments of `ray.init`, which is not called."""
    asked = []
    ray = ModuleType("ray")
    ray.__version__, ray.is_initialized = "2.60.0", lambda: False
    ray.init = lambda *address, **options: asked.append((address, options))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    monkeypatch.setattr(_ray_cluster, "_own", None)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    return asked


@pytest.fixture
def port():
    """A socket at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


def write_address(folder, address):
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address)


@pytest.mark.parametrize("where", ["variable", "file", "somebody's file", "local", "nowhere"])
def test_the_cluster_is_the_users_or_one_of_its_own(monkeypatch, tmp_path, asked, port, where):
    if where in ("variable", "local"):
        monkeypatch.setenv("RAY_ADDRESS", address_of(port) if where == "variable" else "local")
    if "file" in where:
        write_address(tmp_path, address_of(port))
    if where == "somebody's file":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    started = _ray_cluster.connect(cpus=999.5, timeout=9)
    ((address, options),) = asked
    assert started == (where not in ("variable", "file"))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    if started:
        assert address == ("local",) and options["num_cpus"] == 1000
        assert options["include_dashboard"] is False
    else:
        assert address == () and [*options] == ["logging_level"]


@pytest.mark.parametrize("where", ["variable", "file"])
def test_a_cluster_that_is_gone_is_refused(monkeypatch, tmp_path, asked, port, where):
    address = address_of(port)
    port.close()
    if where == "variable":
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        write_address(tmp_path, address)
    said = {"variable": f"`RAY_ADDRESS={address}`", "file": f"ray_current_cluster` says {address}"}
    with pytest.raises(UsageError, match="no Ray cluster answers there") as error:
        _ray_cluster.connect(cpus=1, timeout=0.1)
    assert said[where] in str(error.value) and "`RAY_ADDRESS=local`" in str(error.value)
    assert isinstance(error.value, UsageError) and asked == []


def test_a_cluster_that_starts_meanwhile_is_waited_for(monkeypatch, asked, port):
    address = port.getsockname()
    port.close()
    monkeypatch.setenv("RAY_ADDRESS", "{}:{}".format(*address))
    servers = []
    monkeypatch.setattr(time, "sleep", lambda s: servers.append(socket.create_server(address)))
    assert not _ray_cluster.connect(cpus=1, timeout=60)
    assert len(asked) == len(servers) == 1
    servers[0].close()


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", ":6379"])
def test_an_address_that_is_none_is_refused(monkeypatch, asked, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=f"`RAY_ADDRESS={address}`: expected `HOST:PORT`"):
        _ray_cluster.connect(cpus=1, timeout=60)
    assert asked == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Version mismatch: started with:\n    Ray: 2.59.0", "Version .* with: Ray: 2.59.0"),
        ("Failed. Traceback:\n  line 1\nray.AuthenticationError: Wrong token.", "Wrong token"),
    ],
)
def test_a_cluster_with_another_ray_or_token_is_refused(monkeypatch, asked, port, said, told):
    def init(**options):
        raise ConnectionError("failed") from RuntimeError(said)

    monkeypatch.setattr(sys.modules["ray"], "init", init)
    monkeypatch.setenv("RAY_ADDRESS", address_of(port))
    told = rf"does not accept the trainer: {told}\. Run .* versions of Ray and"
    with pytest.raises(UsageError, match=told) as error:
        _ray_cluster.connect(cpus=1, timeout=60)
    assert isinstance(error.value, UsageError)


def test_the_folders_of_killed_trainers_are_removed(monkeypatch, tmp_path, asked):
    for name in ("ray-killed", "ray-lives", "ray-starts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / _ray_cluster.LOCK).touch()
        if name != "ray-starts":
            (tmp_path / name / "session_1").mkdir()
    (tmp_path / "ray-mine").mkdir()
    (tmp_path / "ray-link").symlink_to("ray-mine")
    with FileLock(tmp_path / "ray-lives" / _ray_cluster.LOCK):
        assert _ray_cluster.connect(cpus=1, timeout=60)
    new = Path(asked[0][1]["_temp_dir"]).name
    left = {"ray-lives", "ray-starts", "ray-mine", "ray-link", new}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_folders_of_other_users_are_left_alone(monkeypatch, tmp_path, asked):
    (tmp_path / "ray-killed" / "session_1").mkdir(parents=True)
    (tmp_path / "ray-killed" / _ray_cluster.LOCK).touch()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert _ray_cluster.connect(cpus=1, timeout=60)
    assert (tmp_path / "ray-killed" / "session_1").exists()


TRAINER = """
    import os, sys, psutil
    os.environ["RAY_ADDRESS"] = "local"
    os.environ["MY_API_KEY"] = "secret"
    from lit_rlsched.engines import RayEngine, SimulatedEngine
    from lit_rlsched.engines.spec import EngineSpec
    engine = RayEngine(SimulatedEngine())
    engine.start(EngineSpec("", 2, 64, (1,)))
    children = psutil.Process().children(recursive=True)
    assert engine.pid in [child.pid for child in children]
    told = [child.pid for child in children if b"MY_API_KEY" in environment(child.pid)]
    print(told, *[child.pid for child in children], sep=";", flush=True)
    input()
"""


@pytest.fixture(scope="module")
def ends():
    """Ids of processes that end, while the other tests of this file run."""
    pids = []
    yield pids
    while any(map(runs, pids)):
        time.sleep(0.1)


@slow
def test_a_cluster_of_its_own_ends_with_a_trainer_that_is_killed(monkeypatch, ends):
    read = "def environment(pid):\n    return open(f'/proc/{pid}/environ', 'rb').read()\n"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the paths of sockets must be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        trainer = subprocess.Popen(
            [sys.executable, "-c", read + textwrap.dedent(TRAINER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        told, *pids = trainer.stdout.readline().split(";")
        assert told == "[]" and len(pids) > 4
        (session,) = Path(folder).glob("ray-*/session_latest")
        others = [_ray_cluster._new_folder()]
        assert session.exists()
        trainer.kill()
        trainer.communicate()
        others.append(_ray_cluster._new_folder())
        assert {*map(str, Path(folder).iterdir())} == {name for name, _ in others}
        ends += pids  # Ray's agents notice after a minute


def runs(pid):
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_script_of_slurm_is_bash_and_asks_for_one_task_on_a_node():
    script = ROOT / SLURM
    subprocess.run(["bash", "-n", script], check=True)
    options = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    assert "--ntasks-per-node=1" in options and os.access(script, os.X_OK)


def test_the_file_of_the_cluster_launcher_is_what_ray_expects():
    validate = pytest.importorskip("jsonschema").validate
    ray = pytest.importorskip("ray")
    config = yaml.safe_load((ROOT / "examples/cluster/ray_up.yaml").read_text())
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    validate(config, json.loads(schema.read_text()))
    for role in ("head", "worker"):
        *_, start = config[f"{role}_start_ray_commands"]
        assert "RAY_AUTH_MODE=token" in start
