"""A Ray cluster of two hosts, with an engine on each: the run of one process."""

import secrets
import sys
from pathlib import Path

import pytest
from nodes.launching import FOLDER, SCRIPT, given, result
from several_ranks import check_same

pytestmark = pytest.mark.slow
RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def cluster(hosts):
    """Start Ray on both hosts with a token; returns the variables of its users."""
    env = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    first, second = hosts
    shape = ("--num-cpus=1", "--object-store-memory=200000000", "--block")
    at = (f"--node-ip-address={first.address}", "--port=6379", "--include-dashboard=false")
    first.start(RAY, "start", "--head", *at, *shape, env=env)
    address = f"{first.address}:6379"
    second.start(RAY, "start", f"--address={address}", *shape, env=env)
    return env | {"RAY_ADDRESS": address}


def test_engines_on_both_hosts_draw_what_one_draws(hosts, cluster):
    first, second = hosts
    exact = {"precision": "64-true", "rounds": 3}
    one = first.start(sys.executable, SCRIPT, FOLDER, given("one", hosts[:1], 1, **exact))
    alone = result(hosts[:1], "one", [one])
    run = {"engine": "TransformersEngine", "ray": True, "data": {"num_engines": 2}, **exact}
    process = first.start(
        sys.executable, SCRIPT, FOLDER, given("two", hosts[:1], 1, **run), env=cluster
    )
    both = result(hosts[:1], "two", [process])
    check_same([alone, both], 0.0)
    assert second.sent() > 1e6  # and the other engine was there
