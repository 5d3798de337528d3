"""A Ray cluster of two hosts, with an engine on each: the run with two engines on one host."""

from importlib.util import find_spec

import pytest
from several_ranks import check_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


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


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_on_another_host_draws_the_same(nodes, cluster):
    alone, run = nodes.servers[:1], {"engine": "VLLMEngine"}
    child = nodes.run("one", alone, **run)
    far = {"engine_settings": {"resources": {"CPU": 1.0, "far": 1.0}}}
    (rank,) = nodes.start("two", alone, env=cluster, ray=True, **far, **run)
    check_same([child, nodes.result("two", [rank])], 0.0)
    assert "ip=" + nodes.hosts[1].address in rank.said, rank.said[-3000:]
