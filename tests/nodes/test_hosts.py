"""Hosts share what they must and nothing else, and leave nothing behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts as made
import pytest


@pytest.fixture
def hosts():
    """Two hosts of this test alone."""
    if why := made.obstacle():
        pytest.skip(why)
    with made.hosts(2) as both:
        yield both


SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def test_what_a_host_writes_is_its_own(hosts):
    first, second = hosts
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "$HOME", "/mnt"):
        first.run("sh", "-c", f"echo mine > {folder}/file")
        assert "file" not in second.run("sh", "-c", f"ls -a {folder}")
    for folder in (made.REPO, Path.home()):  # all can read them
        said = first.start("touch", folder / "never").communicate(timeout=30)[0]
        assert "Read-only file system" in said
    assert first.path("/tmp/file").read_text() == "mine\n"


def test_they_have_names_and_reach_each_other(hosts):
    first, second = hosts
    assert [host.run("hostname") for host in hosts] == ["h1\n", "h2\n"]
    server = second.start(sys.executable, "-m", "http.server", "8000", "--bind", "::")
    ask = "import urllib.request as u; print(*[u.urlopen(f'http://{at}:8000/', timeout=2).status "
    ask += f"for at in ('h2', '[{second.address6}]')])"
    for _ in range(100):
        if ":8000" in second.run("ss", "-ltn"):
            break
        time.sleep(0.1)
    before = second.sent()
    assert first.run(sys.executable, "-c", ask) == "200 200\n" and second.sent() > before
    second.link(up=False)
    assert first.start(sys.executable, "-c", ask).wait() != 0
    second.link(up=True)
    assert first.run(sys.executable, "-c", ask) == "200 200\n"
    assert server.poll() is None


def test_their_processes_are_their_own_and_end_with_them(hosts):
    first, second = hosts
    process = first.start(*SLEEP)
    for _ in range(100):
        if first.processes():
            break
        time.sleep(0.05)
    assert not second.processes() and second.signal(signal.SIGKILL, "sleep(600)") == 0
    assert first.signal(signal.SIGSTOP, "sleep(600)") == 1
    inside = [int(pid) for pid in _below(first.pid)]
    assert len(inside) == 2, "with the one that holds the host"
    subprocess.run(["kill", "-9", str(first.pid)], check=True)
    for _ in range(100):
        if all(_state(pid) in (None, "Z") for pid in inside):
            break
        time.sleep(0.05)
    assert all(_state(pid) in (None, "Z") for pid in inside)
    assert process.poll() is None, "it waits outside"


def _state(pid):
    """Return the state of a process; `Z`: it has ended."""
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else None


def _below(pid):
    """Processes of a host, by their numbers outside."""
    spaces = {p.parent.parent.name: p.readlink() for p in Path("/proc").glob("[0-9]*/ns/pid")}
    return [p for p, space in spaces.items() if space == spaces[str(pid)] and p != str(pid)]
