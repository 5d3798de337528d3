"""Starts the ranks of a run on hosts, and reads what they have written there."""

import json
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).with_name("node_run.py")
FOLDER, MODEL = "/tmp/run", "/tmp/model"


def given(name, hosts, ranks, **run):
    """Return a run as the script takes it; `ranks` of each host."""
    both = {"nodes": len(hosts), "ranks": ranks * len(hosts), "model": MODEL}
    return json.dumps({"name": name, **both, **run})


def alone(host, name, **run):
    """Start a run of one process."""
    return [host.start(sys.executable, SCRIPT, FOLDER, given(name, [host], 1, **run))]


def torchrun(hosts, name, ranks=1, second=(), **run):
    """Start a run with `torchrun` on each host; returns the processes.

    `second` has what is another on the second host.
    """
    shape = [f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks}"]
    meet = [f"--master-addr={hosts[0].name}", "--master-port=29511"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *shape, *meet]
    return [
        host.start(
            *launcher,
            f"--node-rank={number}",
            SCRIPT,
            FOLDER,
            given(name, hosts, ranks, **(run | dict(second) if number else run)),
        )
        for number, host in enumerate(hosts)
    ]


def printed(processes, timeout=300.0):
    """Wait for processes; return what each has printed."""
    return [process.communicate(timeout=timeout)[0] for process in processes]


def result(hosts, name, processes, ranks=1):
    """Return exit codes and what each rank has written on its host, as the tests of ranks do."""
    said = printed(processes)
    codes = [process.returncode for process in processes]
    if any(codes):
        return {"codes": codes, "said": said}
    wrote = [
        json.loads(host.path(f"{FOLDER}/{name}.{number * ranks + i}.json").read_text())
        for number, host in enumerate(hosts)
        for i in range(ranks)
    ]
    weights = torch.load(hosts[0].path(f"{FOLDER}/{name}.pt"))
    return {"codes": codes, "said": said, "ranks": wrote, "weights": weights}
