"""A memory cgroup (version 2) for each reward worker, where this user may make one."""

import os
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "lit_rlsched-reward-"


class MemoryGroup:
    """A cgroup whose memory the kernel limits: private, shared, of every process in it together.

    The kernel ends all of its processes at once where they need more.

    Args:
        folder: Of a cgroup with the memory controller in which others may be made.
        name: Of the new one.

    Raises:
        OSError: it cannot be made after all.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{PREFIX}{name}"
        self._path.mkdir()

    def add(self, pid: int) -> None:
        """Take a process in; what it holds already stays where it was charged."""
        self._write("cgroup.procs", pid)

    def limit(self, more: int) -> None:
        """From now on, let its processes take so many bytes on top of what they hold."""
        self._write("memory.oom.group", 1)
        with suppress(OSError):  # a kernel without swap
            self._write("memory.swap.max", 0)
        self._write("memory.max", int((self._path / "memory.current").read_text()) + more)

    @property
    def struck(self) -> bool:
        """Whether the kernel has ended its processes for their memory."""
        with suppress(OSError):
            events = (self._path / "memory.events").read_text().split()
            return int(events[events.index("oom_kill") + 1]) > 0
        return False

    def remove(self) -> None:
        """End all that is left in it, daemons too, and remove it."""
        with suppress(OSError):  # a kernel before 5.14
            self._write("cgroup.kill", 1)
        for _ in range(50):  # a process that was killed takes a moment
            with suppress(OSError):
                self._path.rmdir()
            if not self._path.exists():
                return
            time.sleep(0.01)

    def _write(self, file: str, value: int) -> None:
        (self._path / file).write_text(str(value))


def new_group(pid: int, name: str) -> MemoryGroup | None:
    """A cgroup with this process in it, where one may be made."""
    if (folder := writable_cgroup()) is None:
        return None
    with suppress(OSError):
        group = MemoryGroup(folder, name)
        try:
            group.add(pid)
        except OSError:  # the way there leads through one that is not ours
            group.remove()
        else:
            return group
    return None


def writable_cgroup(
    own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")
) -> Path | None:
    """The cgroup in which those of the workers may be made, if there is one.

    Mostly it is the one above this process's own: one that holds processes passes no controller on,
    unless it is the root.

    Args:
        own: Says which cgroup this process is in.
        mounts: Says where cgroups are mounted.
    """
    with suppress(OSError, StopIteration):
        lines = (line.split() for line in mounts.read_text().splitlines())
        root = next(Path(where) for _, where, kind, *_ in lines if kind == "cgroup2")
        entries = own.read_text().splitlines()
        path = next(entry[3:] for entry in entries if entry.startswith("0::"))
        mine = root / path.lstrip("/")
        for folder in (mine, mine.parent):
            controllers = (folder / "cgroup.subtree_control").read_text().split()
            files = (folder, folder / "cgroup.procs")
            if "memory" in controllers and all(os.access(file, os.W_OK) for file in files):
                return folder
    return None


def remove_leftovers() -> None:
    """Remove what trainers that were killed have left: cgroups without a process."""
    if (folder := writable_cgroup()) is not None:
        for left in folder.glob(f"{PREFIX}*"):
            with suppress(OSError):  # a process is in it
                left.rmdir()
