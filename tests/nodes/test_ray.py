"""A Ray cluster of two hosts, with an engine on each: the run with two engines on one host."""

import shutil
import time
from importlib.util import find_spec

import pytest
from nodes.launching import actors
from several_ranks import check_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


@pytest.mark.parametrize("cluster", ["day_ahead"], indirect=True)
def test_engines_on_two_hosts_are_those_of_one(nodes, cluster):
    """Also if the hosts' clocks are a day apart."""
    second = nodes.hosts[1]
    exact = {"precision": "64-true", "rounds": 3}
    run = {"engine": "TransformersEngine", "data": {"num_engines": 2}, **exact}
    children = nodes.run("one", nodes.servers[:1], **run)
    before = second.sent()
    (rank,) = nodes.start("two", nodes.servers[:1], env=cluster, ray=True, **run)
    found = []
    while rank.code is None and not found:
        found = actors(second)
    assert rank.wait() == 0 and found, rank.said[-3000:]
    check_same([children, nodes.result("two", [rank])], 0.0)
    assert second.sent() - before > 1e5
    assert any("gcs_server" in args for args in nodes.hosts[0].processes().values()), "it is ours"


def test_ranks_that_share_the_policy_and_engines_on_both_hosts(nodes, cluster):
    run = {"engine": "TransformersEngine", "data": {"num_engines": 2}, "precision": "64-true"}
    run["strategy"] = "fsdp2"
    children = nodes.run("one", **run)
    alone = {**children, "ranks": children["ranks"][:1]}  # of two that are equal
    ranks = nodes.start("two", env=cluster, ray=True, **run)
    found = set()
    while len(found) < 2 and ranks[0].code is None:
        found |= {host.name for host in nodes.hosts if actors(host)}
        time.sleep(0.1)
    check_same([alone, children, nodes.result("two", ranks)], 0.0)
    assert len(found) == 2, ranks[0].said


def test_an_engine_on_a_host_without_the_model(nodes, cluster):
    shutil.rmtree(nodes.hosts[1].path(f"{nodes.folder}/model"))
    far = {"engine_settings": {"resources": {"CPU": 1.0, "far": 1.0}}}
    run = {"engine": "TransformersEngine", "ray": True, **far}
    (rank,) = nodes.start("run", nodes.servers[:1], env=cluster, **run)
    assert rank.wait()
    assert f"`model={nodes.folder}/model`: there is no such folder on h2" in rank.said, rank.said


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_on_another_host_draws_the_same(nodes, cluster):
    alone, run = nodes.servers[:1], {"engine": "VLLMEngine"}
    child = nodes.run("one", alone, **run)
    far = {"engine_settings": {"resources": {"CPU": 1.0, "far": 1.0}}}
    (rank,) = nodes.start("two", alone, env=cluster, ray=True, **far, **run)
    check_same([child, nodes.result("two", [rank])], 0.0)
    assert "ip=" + nodes.hosts[1].address in rank.said, rank.said[-3000:]
