"""What a stranger in the network of a run can reach."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from nodes.launching import reached
from nodes.test_failures import ENGINES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
PAGE = Path(__file__).parents[2] / "docs/howto/several_machines.md"
TRY = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reached(place):
    try:
        return socket.create_connection(place, timeout=2).close() is None
    except OSError:
        return False
places = [tuple(place) for place in json.loads(sys.argv[1])]
with ThreadPoolExecutor(32) as threads:
    print(json.dumps([of for of, yes in zip(places, threads.map(reached, places)) if yes]))
"""
JOIN = "import ray; ray.init(sys.argv[1], logging_level='ERROR'); print(ray.nodes())"
"""What a stranger would do who wants to read weights or feed tokens."""


def listening(host):
    """Return the ports of a host that listen to others."""
    rows = [row.split() for row in host.run("ss", "-H", "-l", "-t", "-n").splitlines()]
    ends = [row[3].rpartition(":") for row in rows]
    return sorted({int(port) for address, _, port in ends if address not in ("127.0.0.1", "[::1]")})


def rules(hosts):
    """Return the rules of the page for these hosts."""
    (text,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    for name, kind in ("machines", "address"), ("machines6", "address6"):
        addresses = ", ".join(getattr(host, kind) for host in hosts)
        text, found = re.subn(
            rf"(set {name} \{{[^}}]*elements = )\{{.*?\}}", rf"\1{{ {addresses} }}", text
        )
        assert found == 1
    return text


def test_a_stranger_reaches_nothing(nodes, three, cluster, firewall):
    *ours, stranger = three
    more = {"ray": True, "held": "rollout", "env": cluster}
    ranks = nodes.start("run", **more, **ENGINES, strategy="ddp")
    reached(nodes, ranks, "run.rollout")
    places = [
        (address, port)
        for host in ours
        for port in listening(host)
        for address in (host.address, host.address6)
    ]

    def open_to(host):
        return json.loads(host.run(sys.executable, "-c", TRY, json.dumps(places), timeout=120))

    before = open_to(stranger)
    assert len(before) > 5, "so the rules have something to close"
    for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        join = stranger.start(
            sys.executable, "-c", f"import sys; {JOIN}", cluster["RAY_ADDRESS"], env=token
        )
        said = join.communicate(timeout=120)[0]
        assert join.returncode and "oken" in said and "NodeID" not in said, said
    firewall(rules(ours))
    assert open_to(stranger) == []
    assert all(rank.wait() == 0 for rank in ranks), [rank.said[-3000:] for rank in ranks]
    more |= {"held": "never", "env": {**cluster, "MASTER_ADDR": ours[0].address6}}
    again = nodes.start("again", strategy="ddp", **more, **ENGINES)
    assert all(rank.wait() == 0 for rank in again), [rank.said[-3000:] for rank in again]
