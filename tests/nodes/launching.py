"""Starts the ranks of a run on hosts, and reads what they have written there."""

import json
import shutil
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PATH = "/usr/bin:/usr/sbin:/bin:/sbin"
PORTS = count(29600)


def need(packages, *programs):
    """Skip a test where programs of Debian's packages are missing."""
    if missing := [name for name in programs if not shutil.which(name, path=PATH)]:
        pytest.skip(f"no {', '.join(missing)} here (Debian: {packages})")


class Server:
    """A process on a host that has done the imports, and forks ranks."""

    def __init__(self, host):
        self.host = host
        self.process = host.start(sys.executable, HERE / "host_server.py", talks=True)

    def start(self, folder, run, env=()):
        """Start a rank in a folder of the host."""
        log = f"/tmp/{run['name']}-{next(PORTS)}.log"
        given = {"folder": folder, "run": run, "env": dict(env), "log": log}
        print(json.dumps(given), file=self.process.stdin, flush=True)
        pid = ""
        while not pid.strip().isdigit():  # after what the imports say
            pid = self.process.stdout.readline()
            assert pid, "the server has ended"
        return Rank(self.host, int(pid), log)


class Rank:
    """A process on a host."""

    def __init__(self, host, pid, log):
        self.host, self.pid = host, pid
        self._log = host.path(log)
        self._code = host.path(f"{log}.code")

    @property
    def code(self):
        """Its exit code; `None`: it runs."""
        return int(self._code.read_text()) if self._code.exists() else None

    @property
    def said(self):
        return self._log.read_text()

    def wait(self, seconds=300):
        """Wait for its end; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            assert time.monotonic() < deadline, self.said[-5000:]
            time.sleep(0.05)
        return self.code


def start(servers, folder, name, ranks=1, second=(), env=(), second_env=(), **run):
    """Start the ranks of a run, `ranks` of them on each host.

    `second` and `second_env` have what is another on the second host.
    """
    size, port = ranks * len(servers), next(PORTS)
    made = []
    for node, server in enumerate(servers):
        own = {
            "name": name,
            "model": f"{folder}/model",
            "nodes": len(servers),
            "ranks": size,
            **run,
        }
        own |= dict(second) if node else {}
        for local in range(ranks):
            place = {
                "LOCAL_RANK": str(local),
                "NODE_RANK": str(node),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": servers[0].host.name,
                "MASTER_PORT": str(port),
            }
            other = dict(second_env) if node else {}
            given = {**(place if size > 1 else {}), **dict(env), **other}
            made.append(server.start(folder, own, given))
    return made


def reached(nodes, ranks, file):
    """Wait until the leader of a run has left a file."""
    path = nodes.hosts[0].path(f"{nodes.folder}/{file}")
    deadline = time.monotonic() + 300
    while not path.exists():
        assert all(rank.code is None for rank in ranks), [rank.said for rank in ranks]
        assert time.monotonic() < deadline, f"no {file}: {ranks[0].said}"
        time.sleep(0.05)


def actors(host):
    """Return the processes of Ray's actors on a host."""
    return [pid for pid, args in host.processes().items() if args.startswith("ray::EngineActor")]


def result(servers, folder, name, ranks):
    """Wait for a run; returns exit codes and what each rank has written, as `ranks/` does."""
    codes = [rank.wait() for rank in ranks]
    said = [rank.said for rank in ranks]
    if any(codes):
        return {"codes": codes, "said": said}
    wrote = [
        json.loads(rank.host.path(f"{folder}/{name}.{number}.json").read_text())
        for number, rank in enumerate(ranks)
    ]
    weights = torch.load(servers[0].host.path(f"{folder}/{name}.pt"))
    return {"codes": codes, "said": said, "ranks": wrote, "weights": weights}
