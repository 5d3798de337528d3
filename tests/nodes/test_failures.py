"""What is lost in each phase of a run on two hosts, and what becomes of the run.

`make failures` loses everything in every phase, and prints a table; else only some are tried.
"""

import os
import re
import shutil
import signal
import time
from importlib.util import find_spec
from itertools import product

import pytest
from nodes.launching import actors, reached

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("nodes")]
PHASES = ("rollout", "sync", "update", "checkpoint", "validation")
ALL = os.environ.get("FAILURES") == "all"
SILENCE = 6.0
"""Seconds without a sign of life, in place of two minutes."""
HANG = 20.0
"""Seconds after which an engine hangs, in place of two minutes or more."""
RUN = {
    "precision": "64-true",
    "rounds": 4,
    "data": {"val_data": [{"prompt": f"{a}+9=", "answer": str(a + 9)} for a in range(4)]},
}
ENGINES = {**RUN, "engine": "TransformersEngine", "hang": HANG}
ENGINES["data"] = {**RUN["data"], "num_engines": 2}
whole = {}
"""Results of runs in which nothing is lost."""


def saving(nodes):
    """Settings of a run that saves after each round."""
    folder = {"dirpath": f"{nodes.folder}/checkpoints", "max_share": 1.0}
    return {"callbacks": {"RoundCheckpoint": folder}}


def same_as_whole(nodes, ranks, servers, tolerance=0.0, **run):
    """Check that a run has learned what it does if nothing is lost."""
    result, key = nodes.result("run", ranks), str(run)
    if key not in whole:
        whole[key] = nodes.run("whole", servers, **run)
    gap = (result["weights"] - whole[key]["weights"]).abs().max()
    assert gap <= tolerance, gap


def strike(host, what, *pids):
    """Kill or freeze processes, or pull the cable of their host out."""
    if what == "cut off":
        host.link(up=False)
    elif pids:
        number = signal.SIGKILL if what == "killed" else signal.SIGSTOP
        host.run("kill", f"-{number.value}", *map(str, pids))


SOME_RANKS = [
    ("ddp", 1, "killed", "rollout"),
    ("ddp", 1, "cut off", "update"),
    ("fsdp2", 0, "frozen", "checkpoint"),
]
EVERY = product(("ddp", "fsdp2"), (0, 1), ("killed", "frozen", "cut off"), PHASES)


@pytest.mark.parametrize(("strategy", "number", "what", "phase"), [*EVERY] if ALL else SOME_RANKS)
def test_a_rank(nodes, record_property, strategy, number, what, phase):
    """The other ranks end and name it; the run goes on from its checkpoint to the same weights."""
    run = {**RUN, "strategy": strategy}
    ranks = nodes.start("run", held=phase, silence=SILENCE, **run, **saving(nodes))
    reached(nodes, ranks, f"run.{phase}")
    lost, other = ranks[number], ranks[1 - number]
    began = time.monotonic()
    strike(lost.host, what, lost.pid)
    assert other.wait(60)
    seconds = time.monotonic() - began
    how = "died" if what == "killed" else "shows no sign of life"
    sentence = rf"Rank {number} \(process {lost.pid} on h{number + 1}\) .*{how}"
    assert re.search(sentence, other.said), other.said[-3000:]
    record_property("lost", ("torchrun", strategy, f"rank {number} {what}", phase, "ends", seconds))
    lost.host.link(up=True)
    if what == "frozen":
        lost.host.run("kill", f"-{signal.SIGCONT.value}", str(lost.pid))
    assert lost.wait(60)
    nothing_left(nodes)
    first, second = (host.path(f"{nodes.folder}/checkpoints") for host in nodes.hosts)
    shutil.copytree(first, second)
    again = nodes.start("run", ckpt_path=f"newest of {nodes.folder}/checkpoints", **run)
    same_as_whole(nodes, again, nodes.servers, **run)


@pytest.mark.parametrize(
    ("strategy", "phase"), [*product(("ddp", "fsdp2"), PHASES)] if ALL else [("ddp", "update")]
)
def test_a_link_that_is_down_for_ten_seconds(nodes, record_property, strategy, phase):
    """The run goes on, if ranks may be silent for longer."""
    run = {**RUN, "strategy": strategy}
    ranks = nodes.start("run", held=phase, silence=60.0, **run, **saving(nodes))
    reached(nodes, ranks, f"run.{phase}")
    began = time.monotonic()
    down_for_ten_seconds(nodes.hosts[1])
    assert [rank.wait() for rank in ranks] == [0, 0]
    seconds = time.monotonic() - began
    record_property("lost", ("torchrun", strategy, "link for 10 s", phase, "goes on", seconds))
    same_as_whole(nodes, ranks, nodes.servers, **run)


def down_for_ten_seconds(host):
    """Pull the cable out and put it in again."""
    host.link(up=False)
    time.sleep(10)
    host.link(up=True)


def nothing_left(nodes):
    """Check that only the servers of the tests run on the hosts."""
    for _ in range(100):
        left = [args for host in nodes.hosts for args in host.processes().values()]
        if len(left) == len(nodes.hosts):
            return
        time.sleep(0.1)
    raise AssertionError(left)


SOME_PARTS = [("engine killed", "sync"), ("head killed", "rollout")]
LOST = (
    "engine killed",
    "engine frozen",
    "host killed",
    "host frozen",
    "host cut off",
    "host cut off for 10 s",
    "host with a full disk",
)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.xdist_group("of Ray" if ALL else "nodes")  # beside the ranks, if there are many
@pytest.mark.parametrize(
    ("what", "phase"),
    [*product((*LOST, "head killed"), PHASES)] if ALL else SOME_PARTS,
)
def test_a_part_of_a_ray_cluster(nodes, cluster, record_property, what, phase):
    """Without an engine the run goes on; without the head it ends, and says so."""
    alone = nodes.servers[:1]
    part, _, how = what.partition(" ")
    more = {"ray": True, "held": phase, "env": cluster, **saving(nodes)}
    if part == "head":
        more["pause"] = 65.0  # Ray waits for a minute
    (rank,) = nodes.start("run", alone, **more, **ENGINES)
    reached(nodes, [rank], f"run.{phase}")
    first, second = nodes.hosts
    engine = actors(second)
    assert engine, rank.said
    began = time.monotonic()
    if part == "engine":
        strike(second, how, *engine)
    elif part == "head":
        names = first.processes().items()
        strike(first, how, *(pid for pid, args in names if "gcs_server" in args))
    elif how == "frozen":
        second.signal(signal.SIGSTOP, "ray")
    elif how == "with a full disk":
        fill(second, "/tmp")
    elif how == "cut off for 10 s":
        down_for_ten_seconds(second)
    else:
        second.link(up=False)
        if how == "killed":
            second.signal(signal.SIGKILL, "ray")
    try:
        code = rank.wait(400)
    finally:
        second.signal(signal.SIGCONT, "ray")
        make_room(second, "/tmp")
    seconds = time.monotonic() - began
    result = "ends" if code else "goes on"
    record_property("lost", ("Ray", "one rank", what, phase, result, seconds))
    if part == "head":
        assert code and "Failed to connect to GCS within 60 seconds" in rank.said
        path = f"newest of {nodes.folder}/checkpoints"
        (rank,) = nodes.start("run", alone, ckpt_path=path, **ENGINES)
    elif part == "engine" or how in ("killed", "frozen", "cut off"):
        assert re.search(rf"engine \d of 2 on {second.address}", rank.said), rank.said[-3000:]
    # an engine that goes on for another one computes the cache, and so log-probs, in other steps
    same_as_whole(nodes, [rank], alone, 0.0 if part == "head" else 1e-14, **ENGINES)


def fill(host, folder):
    """Leave no byte on the disk of a folder."""
    free = os.statvfs(host.path(folder))
    size = free.f_bavail * free.f_frsize - 2**22
    host.run("fallocate", "--length", str(size), f"{folder}/full")
    host.start("dd", "if=/dev/zero", f"of={folder}/rest", "bs=64k").wait()
    assert os.statvfs(host.path(folder)).f_bavail == 0


def make_room(host, folder):
    """Take away what `fill` has left."""
    host.run("rm", "-f", f"{folder}/full", f"{folder}/rest")


@pytest.mark.parametrize("phase", PHASES if ALL else ["checkpoint"])
def test_a_full_disk(nodes, record_property, phase):
    """The run goes on without checkpoints, and saves again when there is room."""
    first = nodes.hosts[0]
    run = {**RUN, "strategy": "ddp"}
    ranks = nodes.start("run", held=phase, **run, **saving(nodes))
    reached(nodes, ranks, f"run.{phase}")
    folder = first.path(f"{nodes.folder}/checkpoints")
    before = {*folder.glob("*.ckpt")}
    fill(first, nodes.folder)
    began = time.monotonic()
    try:
        while "No checkpoint was saved, and the run continues" not in ranks[0].said:
            assert time.monotonic() < began + 60 and ranks[0].code is None, ranks[0].said
            time.sleep(0.05)
    finally:
        make_room(first, nodes.folder)
    seconds = time.monotonic() - began
    lost = ("torchrun", "ddp", "room on rank 0's disk", phase, "goes on", seconds)
    record_property("lost", lost)
    same_as_whole(nodes, ranks, nodes.servers, **run)
    assert {*first.path(f"{nodes.folder}/checkpoints").glob("*.ckpt")} - before
