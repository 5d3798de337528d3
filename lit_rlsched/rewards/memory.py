"""How much memory reward workers hold, and ending those that hold too much."""

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

INTERVAL = 0.1
"""Seconds between two looks: what is filled meanwhile comes on top of the limit."""
_ROUGH = re.compile(r"(RssAnon|RssShmem|VmSwap):\s+(\d+) kB")
_EXACT = re.compile(r"^(Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB", re.MULTILINE)


class Watched(Protocol):
    """A worker, as it is looked at."""

    def check_memory(self) -> None:
        """End it if it holds too much."""


class MemoryWatch:
    """A thread that looks at the memory of reward workers.

    The kernel's limit on a process does not count shared memory, and holds for each process that a
    function starts by itself. A thread, because the trainer looks between decode steps only.

    Args:
        workers: Gives those to look at. Called in the thread; None ends it.
    """

    def __init__(self, workers: Callable[[], Iterable[Watched] | None]) -> None:
        self._workers = workers
        self._stopped = threading.Event()
        if sys.platform == "linux":
            threading.Thread(target=self._run, name="reward-memory", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL) and (workers := self._workers()) is not None:
            for worker in workers:
                worker.check_memory()


def held_memory(pid: int, more_than: float = 0) -> int:
    """Bytes that a process and its descendants hold.

    Private memory, in RAM and in swap, and shared memory: what is mapped or what is in files of
    `/dev/shm` and memfds that are open, whichever is more, since mostly the two are the same.

    Args:
        pid: Of the process.
        more_than: Only above this many bytes is it told exactly. Below, memory that processes share
            after a fork is counted for each of them, which is quicker.
    """
    if sys.platform != "linux":
        return 0
    processes = list(with_descendants(pid))
    files = {name: size for process in processes for name, size in shared_files(process)}
    held = _sum(processes, "status", _ROUGH, sum(files.values()))
    if held > more_than:
        held = _sum(processes, "smaps_rollup", _EXACT, sum(files.values())) or held
    return held


def _sum(processes: Iterable[int], file: str, pattern: re.Pattern[str], in_files: int) -> int:
    private = mapped = 0
    for process in processes:
        with suppress(OSError):  # it has ended
            for name, size in pattern.findall(read(f"/proc/{process}/{file}")):
                if name.endswith("Shmem"):
                    mapped += int(size) * 1024
                else:
                    private += int(size) * 1024
    return private + max(mapped, in_files)


def read(path: str) -> str:
    """Text in which a process may have put its name, which may be any bytes."""
    return Path(path).read_text(errors="replace")


def with_descendants(pid: int) -> Iterator[int]:
    """The process, its children, theirs, and so on."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in children.split():
                yield from with_descendants(int(child))


def shared_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Files in memory that a process holds open, and the bytes of each."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                path = f"/proc/{pid}/fd/{descriptor}"
                # not `stat` at once: it would wait for a file system of the network
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    file = os.stat(path)
                    yield (file.st_dev, file.st_ino), file.st_blocks * 512


def warn_of_no_limit(limit: int | None) -> None:
    """Say that a limit which was asked for does not hold, where there is nothing to hold it."""
    if limit is not None and sys.platform != "linux":
        warnings.warn(
            f"`reward_memory_limit={limit >> 20}MiB` does not hold here: memory of reward workers "
            f"is limited on Linux only, and this is `{sys.platform}`. A function may take all "
            "memory of the machine.",
            stacklevel=3,
        )


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container this runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: "max"
            sizes.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(sizes)
