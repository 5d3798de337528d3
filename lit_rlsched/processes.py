"""Child processes that end with their parent.

Little is imported, because each reward worker starts with it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import Pipe

from lit_rlsched.settings import UsageError

FOR_TRAINER = (signal.SIGUSR1, signal.SIGUSR2) if sys.platform != "win32" else ()
"""Signals of SLURM to a job, which only the trainer handles."""


class ChildProcess:
    """A Python process with a pipe to it, which dies when its parent does.

    It runs in its own session: Ctrl-C reaches only the parent, and killing the process group also
    ends the processes that the child started. SLURM's signal to all processes of a job does not
    reach them. `multiprocessing` is not used, as it would run an unguarded script of the user again
    in each child.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.connection, theirs = Pipe()
        read, self._lifeline = os.pipe()
        descriptors = [theirs.fileno(), read]
        numbers = map(str, [*descriptors, os.getpid()])
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_TRAINER)  # children inherit it
        try:
            self.process = subprocess.Popen(
                [sys.executable, *arguments, *numbers],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        os.close(read)

    def kill_group(self) -> None:
        """Kill the process group of the child, which must not have been waited for."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe and the lifeline."""
        self.connection.close()
        if self._lifeline >= 0:  # a second call does nothing
            os.close(self._lifeline)
            self._lifeline = -1


def die_with(parent: int, lifeline: int) -> None:
    """Kill this process and its process group when the parent dies, even inside C code."""
    import fcntl  # missing on Windows, where no child process is started

    if hasattr(fcntl, "F_SETSIG"):
        # Linux: the kernel kills when the pipe is closed, even while C code (`re`) holds the GIL
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | fcntl.FASYNC)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def how_it_ended(code: int | None) -> str:
    """Put an exit code into words."""
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"died of {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"


PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM"),
    *("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "VIRTUAL_ENV"),
    *("CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "TOKENIZERS_PARALLELISM"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Variables that Python, its packages and programs started by reward functions need."""
PASSED_PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCM_", "ROCR_", "TORCH", "PYTORCH_"),
    *("TRITON_", "VLLM_", "HF_", "TRANSFORMERS_"),
)
"""Settings of the interpreter, of threads and devices, and of the libraries that run models."""
PROXIES = (
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)
"""Network proxies: passed on unless they contain a password."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


def passed(name: str, value: str) -> bool:
    """Whether all reward workers get this variable."""
    if name in PROXIES:
        return "@" not in value
    return name in PASSED or (name.startswith(PASSED_PREFIXES) and not _SECRET.search(name))


def worker_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a reward worker."""
    named = set(named)
    return {
        name: value for name, value in os.environ.items() if name in named or passed(name, value)
    }


def keep_heap() -> bool:
    """Make glibc allocate big tensors on a heap that never shrinks.

    CPU training gets several times faster, as glibc would return big blocks and fault them in
    again, and the process keeps its peak memory until it ends. Call it before the first big
    allocation.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    mmap_max, trim_threshold, top_pad, arena_max = -4, -1, -2, -8  # their numbers in malloc.h
    settings = {mmap_max: 0, trim_threshold: -1, top_pad: 256 << 20, arena_max: 1}
    return all([mallopt(option, value) == 1 for option, value in settings.items()])


def require_posix(part: str) -> None:
    """Refuse Windows; `part` is the subject of the message's sentence."""
    if sys.platform == "win32":
        raise UsageError(f"{part} cannot run on Windows. Use Linux, macOS or WSL 2.")
