"""Memory that reward workers hold."""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_ROUGH = re.compile(r"(RssAnon|RssShmem|VmSwap):\s+(\d+) kB")
_EXACT = re.compile(r"^(Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB", re.MULTILINE)


def held_memory(pid: int, more_than: float = 0) -> int:
    """Return the bytes that a process and its descendants hold.

    This counts private memory, in RAM and in swap, and shared memory: the larger of what is mapped
    and what lies in open memfds and open files of `/dev/shm`, as mostly these are the same.

    Args:
        pid: Process id.
        more_than: Below this many bytes a quicker method is used, which counts memory that
            processes share after a fork once for each of them.
    """
    if sys.platform != "linux":
        return 0
    processes = list(_with_descendants(pid))
    files = {name: size for process in processes for name, size in _shared_files(process)}
    held = _sum(processes, "status", _ROUGH, sum(files.values()))
    if held > more_than:
        held = _sum(processes, "smaps_rollup", _EXACT, sum(files.values())) or held
    return held


def _sum(processes: Iterable[int], file: str, pattern: re.Pattern[str], in_files: int) -> int:
    private = mapped = 0
    for process in processes:
        with suppress(OSError):  # it has ended
            # a process may give itself a name that is not text
            text = Path(f"/proc/{process}/{file}").read_text(errors="replace")
            for name, size in pattern.findall(text):
                if name.endswith("Shmem"):
                    mapped += int(size) * 1024
                else:
                    private += int(size) * 1024
    return private + max(mapped, in_files)


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in children.split():
                yield from _with_descendants(int(child))


def _shared_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the identity and the bytes of each file in memory that a process holds open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                path = f"/proc/{pid}/fd/{descriptor}"
                # check the name first: `stat` may block on a network file system
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    file = os.stat(path)
                    yield (file.st_dev, file.st_ino), file.st_blocks * 512


def warn_of_no_limit(limit: int | None) -> None:
    """Warn that a memory limit has no effect on this platform."""
    if limit is not None and sys.platform != "linux":
        warnings.warn(
            f"`reward_memory_limit={limit >> 20}MiB` has no effect: memory of reward workers is "
            f"limited on Linux only, and this is `{sys.platform}`. A function may take all memory "
            "of the machine.",
            stacklevel=3,
        )


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container this runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: "max"
            sizes.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(sizes)


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended since boot."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return 0
