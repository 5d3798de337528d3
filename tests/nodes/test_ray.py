"""A Ray cluster of two hosts, with an engine on each: the run with two engines on one host."""

import secrets
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from several_ranks import check_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def cluster(both):
    """Start Ray on both hosts with a token; returns the variables of its users."""
    env = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    first, second = both
    shape = ("--num-cpus=1", "--object-store-memory=200000000", "--block")
    at = (f"--node-ip-address={first.address}", "--port=6379", "--include-dashboard=false")
    head = first.start(RAY, "start", "--head", *at, *shape, env=env)
    address = f"{first.address}:6379"
    node = second.start(RAY, "start", f"--address={address}", *shape, env=env)
    yield env | {"RAY_ADDRESS": address}
    for host in (second, first):
        host.run(RAY, "stop", "--force", env=env)
    node.communicate(timeout=30)
    head.communicate(timeout=30)
    assert not [of for host in both for of in host.processes().values() if "raylet" in of]


def test_engines_on_two_hosts_are_those_of_one(nodes, cluster):
    second = nodes.hosts[1]
    exact = {"precision": "64-true", "rounds": 3}
    run = {"engine": "TransformersEngine", "data": {"num_engines": 2}, **exact}
    children = nodes.run("one", nodes.servers[:1], **run)
    before = second.sent()
    (rank,) = nodes.start("two", nodes.servers[:1], env=cluster, ray=True, **run)
    actors = []
    while rank.code is None and not actors:
        actors = [of for of in second.processes().values() if "Actor" in of or "ray::" in of]
    assert rank.wait() == 0 and actors, rank.said[-3000:]
    check_same([children, nodes.result("two", [rank])], 0.0)
    assert second.sent() - before > 1e5
