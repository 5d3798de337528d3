"""Hosts for runs on several of them."""

import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hosts as made
import pytest
from nodes.launching import Server, need, result, start

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """The folder that the hosts share as `/mnt`."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def three(shared):
    """Hosts for all tests."""
    if why := made.obstacle():
        pytest.skip(why)
    with made.hosts(3, shared) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def both(three):
    """The two hosts of a run."""
    return three[:2]


@pytest.fixture(scope="session")
def servers(both):
    return [Server(host) for host in both]


@pytest.fixture
def nodes(both, servers, tiny_model, tmp_path):
    """Two hosts, each with the model in a folder of its own, which other tests do not use."""
    folder = f"/tmp/{tmp_path.name}"
    for host in both:
        host.run("mkdir", folder)
        shutil.copytree(tiny_model, host.path(f"{folder}/model"))

    def run(name, on=servers, **more):
        return start(on, folder, name, **more)

    def finished(name, on=servers, **more):
        return result(on, folder, name, run(name, on, **more))

    yield SimpleNamespace(
        hosts=both,
        servers=servers,
        folder=folder,
        start=run,
        run=finished,
        result=lambda name, ranks: result(servers, folder, name, ranks),
    )
    for host in both:
        host.link(up=True)


@pytest.fixture
def firewall(both):
    """Loads rules of nftables on both hosts, until the test ends."""
    closed = []

    def load(rules):
        need("nftables", "nft")
        for host in both:
            closed.append(host)
            host.path("/tmp/rules.nft").write_text(rules)
            host.run("/usr/sbin/nft", "-f", "/tmp/rules.nft")

    yield load
    for host in closed:
        host.run("/usr/sbin/nft", "flush", "ruleset")


def _started(process):
    said = []
    while not said or "Ray runtime started" not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)


@pytest.fixture(scope="session")
def day_ahead(both, tmp_path_factory):
    """Variables of processes on the second host whose clock is a day ahead."""
    need("gcc", "gcc")
    made = tmp_path_factory.mktemp("clock") / "day_ahead.so"
    source = Path(__file__).with_name("day_ahead.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O", "-o", made, source], check=True)
    shutil.copy(made, both[1].path("/tmp"))
    variables = {"LD_PRELOAD": f"/tmp/{made.name}"}
    said = both[1].run("date", "+%s", env=variables)  # after a warning of what starts it
    assert int(said.split()[-1]) > time.time() + 80_000
    return variables


@pytest.fixture
def cluster(both, request):
    """Start Ray on both hosts with a token; returns the variables of its users.

    A parameter names a fixture with further variables of the second host.
    """
    env = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    first, second = both
    own = request.getfixturevalue(request.param) if hasattr(request, "param") else {}
    shape = ("--num-cpus=2", "--object-store-memory=600000000", "--block")
    at = (f"--node-ip-address={first.address}", "--port=6379", "--include-dashboard=false")
    head = first.start(RAY, "start", "--head", *at, *shape, env=env)
    address = f"{first.address}:6379"
    _started(head)
    far = '--resources={"far": 4}'
    node = second.start(RAY, "start", f"--address={address}", *shape, far, env=env | own)
    _started(node)
    yield env | {"RAY_ADDRESS": address}
    for host in (second, first):
        host.link(up=True)
        host.run(RAY, "stop", "--force", env=env)
    node.communicate(timeout=30)
    head.communicate(timeout=30)
    assert not [of for host in both for of in host.processes().values() if "ray" in of]


def pytest_terminal_summary(terminalreporter):
    """Print what has become of the runs that lost something."""
    reports = [of for kind in ("passed", "failed") for of in terminalreporter.getreports(kind)]
    lost = [value for of in reports for name, value in of.user_properties if name == "lost"]
    phases = list(dict.fromkeys(phase for _, _, _, phase, _, _ in lost))
    rows = {}
    for *what, phase, then, seconds in lost:
        rows.setdefault(tuple(what), {})[phase] = f"{then}, {seconds:.0f} s"
    if rows:
        head = ["launcher", "strategy", "lost", *phases]
        terminalreporter.write_line(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for what, cells in sorted(rows.items(), key=lambda row: row[0][:2]):
        line = [*what, *(cells.get(phase, "") for phase in phases)]
        terminalreporter.write_line(f"| {' | '.join(line)} |")
