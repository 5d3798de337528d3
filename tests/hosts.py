"""Hosts on this machine: each has its own network, processes, name and folders.

A host is a process in namespaces of its own; everything that runs in it ends with it. It sees this
machine's programs, the clone and this user's home, and cannot write to the last two. Its home,
cache, temporary and shared-memory folders are its own and empty, so that nothing is shared by
accident. `/mnt` is a folder that all hosts share, if there is one. Hosts reach each other by name
or address.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).parents[1]
SHARED = Path("/mnt")
HOME = Path("/tmp/home")
OWN = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders of a host's own, in memory."""
SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
SECONDS = 30.0


def obstacle() -> str | None:
    """Say why this machine cannot have hosts, or `None`."""
    if not sys.platform.startswith("linux"):
        return "hosts are made of Linux namespaces"
    if missing := [
        name for name in ("ip", "tc", "ps", "unshare", "nsenter") if not shutil.which(name)
    ]:
        return f"hosts need {', '.join(missing)} (Debian: iproute2, procps, util-linux)"
    try_out = "ip link add br0 type bridge && mount -t tmpfs own /mnt"
    command = ["unshare", *SPACES, "--fork", "sh", "-c", try_out]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"this user may not make hosts: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    """One of them."""

    name: str
    address: str
    address6: str
    pid: int
    """Of its first process, as seen from outside."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    """Processes outside that wait for those inside, and stop with them."""

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command line that runs a command in it."""
        inside = ["nsenter", f"--target={self.pid}", *SPACES, f"--wdns={REPO}", "--"]
        return [*inside, *map(str, arguments)]

    def start(
        self, *arguments: str | Path, env: Mapping[str, str] = {}, talks: bool = False
    ) -> subprocess.Popen[str]:
        """Start a command in it, in a session of its own.

        Args:
            arguments: The command.
            env: Further environment variables.
            talks: Whether one can write to it.
        """
        own = {"HOME": str(HOME), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            self.command(*arguments),
            env={**os.environ, **own, **env},
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(
        self, *arguments: str | Path, env: Mapping[str, str] = {}, timeout: float = SECONDS
    ) -> str:
        """Run a command in it, and return what it prints.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        with self.start(*arguments, env=env) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, [*map(str, arguments)], said)
        return said

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes, by their number inside, without its own."""
        rows = [
            row.split(None, 1) for row in self.run("ps", "-eww", "-o", "pid=,args=").splitlines()
        ]
        own = ("ps -eww -o pid=,args=", "sleep infinity")
        return {int(pid): args for pid, args in rows if int(pid) > 1 and args not in own}

    def signal(self, number: signal.Signals, *words: str) -> int:
        """Send a signal to its processes with all of these words in their command lines.

        Returns:
            Number of processes.
        """
        found = [pid for pid, args in self.processes().items() if all(w in args for w in words)]
        if found:  # some may end meanwhile
            self.start("kill", f"-{number.value}", *map(str, found)).communicate(timeout=SECONDS)
        if number == signal.SIGCONT:
            for process in self.started:  # which have stopped with those inside
                process.send_signal(number)
        return len(found)

    def link(self, up: bool) -> None:
        """Pull its cable out, or put it in again."""
        self.run("ip", "link", "set", "eth0", "up" if up else "down")

    def sent(self) -> int:
        """Return the bytes that it has sent to others."""
        (link,) = json.loads(self.run("ip", "-json", "-s", "link", "show", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    def path(self, inside: str | Path) -> Path:
        """Return the path, outside, of a file in it."""
        return Path(f"/proc/{self.pid}/root", *Path(inside).parts[1:])


@contextmanager
def _holder(setup: str, *spaces: str) -> Iterator[int]:
    """Yield the number of a process in namespaces of its own, after a shell has set them up."""
    # as the first of its processes the shell stays, and waits for those whose parents have ended
    rest = "sleep infinity & wait" if "--pid" in spaces else "exec sleep infinity"
    script = f"set -e; {setup}; echo ready; {rest}"
    process = subprocess.Popen(
        ["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = [process.stdout.readline()]
        while said[-1] not in ("ready\n", ""):  # after a warning, perhaps
            said.append(process.stdout.readline())
        assert said[-1], f"a host did not start: {''.join(said)}"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield int(children.split()[0])
    finally:
        process.kill()  # and by `--kill-child` the first process, with all others
        process.wait()
        process.stdout.close()


@contextmanager
def hosts(number: int = 2, shared: Path | None = None, memory: str = "2g") -> Iterator[list[Host]]:
    """Make hosts named `h1`, `h2`, ..., which end with the context.

    Args:
        number: How many.
        shared: Folder that all of them have as `/mnt`.
        memory: Size of each of their own folders.
    """
    names = [f"h{i + 1}" for i in range(number)]
    addresses = [(f"10.99.0.{i + 1}", f"fd99::{i + 1:x}") for i in range(number)]
    table = "\\n".join(f"{a} {n}" for (a, _), n in zip(addresses, names, strict=True))
    own = OWN if shared is not None else (*OWN, str(SHARED))
    bound = (f"'{Path.home()}' '{Path.home()}'", f"/proc/self/fd/9 '{REPO}'")  # in this order
    with ExitStack() as stack:
        hub = stack.enter_context(
            _holder("ip link add br0 type bridge; ip link set br0 up", "--net")
        )
        made = []
        for name, (address, address6) in zip(names, addresses, strict=True):
            steps = [
                f"hostname {name}",
                *([f"mount --bind '{shared}' {SHARED}"] if shared is not None else []),
                f"exec 9< '{REPO}'",  # which may be in a folder that is hidden now
                *(f"mount -t tmpfs -o size={memory} own {folder}" for folder in own),
                f"mkdir -p '{REPO}' {HOME}",
                *(f"mount --no-canonicalize --bind {of}" for of in bound),
                *(f"mount -o remount,bind,ro '{folder}'" for folder in (REPO, Path.home())),
                f"printf '127.0.0.1 localhost\\n{table}\\n' > /tmp/hosts",
                "mount --bind /tmp/hosts /etc/hosts",
                "ip link set lo up",
                "echo 1 > /proc/sys/net/ipv6/conf/all/keep_addr_on_down",
            ]
            spaces = (*SPACES, "--mount-proc", "--propagation=private")
            pid = stack.enter_context(_holder("; ".join(steps), *spaces))
            host = Host(name, address, address6, pid)
            stack.callback(_end, host)
            ends = ("ip", "link", "add", "eth0", "netns", str(pid), "type", "veth")
            _outside(*ends, "peer", "name", name, "netns", str(hub))
            _outside(
                "nsenter", f"--target={hub}", "--net", "ip", "link", "set", name, "master", "br0"
            )
            _outside("nsenter", f"--target={hub}", "--net", "ip", "link", "set", name, "up")
            host.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
            host.run("ip", "addr", "add", f"{address6}/64", "dev", "eth0", "nodad")
            host.link(up=True)
            made.append(host)
        yield made


def _end(host: Host) -> None:
    with suppress(ProcessLookupError):
        os.kill(host.pid, signal.SIGKILL)
    for process in host.started:
        process.kill()  # else one that has stopped with a process inside would stay
        process.wait()


def _outside(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
