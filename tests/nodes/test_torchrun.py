"""`torchrun` on two hosts that share no folder: the run of one process."""

import pytest
from nodes.launching import alone, result, torchrun
from several_ranks import check_same

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_hosts_are_one(hosts, strategy):
    exact = {"precision": "64-true", "rounds": 3}
    first = result(hosts[:1], "one", alone(hosts[0], "one", **exact))
    both = result(hosts, "two", torchrun(hosts, "two", strategy=strategy, **exact))
    check_same([first, both], 1e-11)
