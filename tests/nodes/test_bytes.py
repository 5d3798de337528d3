"""What a weight sync sends over the network.

`MODEL=runs/smollm2 pytest -m slow -s tests/nodes/test_bytes.py` measures a model of your own.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
SCRIPT = Path(__file__).with_name("synced.py")
MODEL = os.environ.get("MODEL")
GBIT = 125e6
"""Bytes a second."""


@pytest.mark.parametrize("engines", [2] if MODEL is None else [1, 2])
def test_weights_cross_the_link_once(nodes, cluster, engines):
    """Whatever the number of engines on the other host."""
    model, dtype = (f"{nodes.folder}/model", "float32") if MODEL is None else (MODEL, "bfloat16")
    first = nodes.hosts[0]
    first.limit("1gbit")
    try:
        arguments = (sys.executable, SCRIPT, model, dtype, engines, 6)
        said = first.run(*arguments, env=cluster, timeout=500)
    finally:
        first.run("tc", "qdisc", "del", "dev", "eth0", "root")
    syncs = [json.loads(row) for row in said.splitlines() if row.startswith('{"of"')][1:]
    assert len(syncs) == 5, said
    for sync in syncs:
        print("\n", engines, sync)
        assert sync["bytes"] < 1.1 * sync["of"] + 300_000, sync
        assert sync["bytes"] > 0.9 * sync["of"], sync
    seconds, bound = median(sync["seconds"] for sync in syncs), syncs[0]["of"] / GBIT
    print(f"\n{engines} engines: {seconds:.2f} s, the link's bound is {bound:.2f} s")
