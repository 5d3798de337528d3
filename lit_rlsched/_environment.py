"""Selects the environment variables that reward workers get, and hides the others from them."""

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PASSED = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM"),
        *("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "VIRTUAL_ENV"),
        *("CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "TOKENIZERS_PARALLELISM"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ]
)
"""Variables that Python, its packages and programs started by reward functions need."""
PASSED_PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCM_", "ROCR_", "TORCH", "PYTORCH_"),
    *("TRITON_", "VLLM_", "HF_", "TRANSFORMERS_"),
)
"""Settings of the interpreter, of threads and devices, and of the libraries that run models."""
PROXIES = tuple(
    name
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for name in (proxy, proxy.upper())
)
"""Network proxies: passed on unless they contain a password."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


def passed(name: str, value: str) -> bool:
    """Whether all reward workers get this variable."""
    if name in PROXIES:
        return "@" not in value
    return name in PASSED or (name.startswith(PASSED_PREFIXES) and not _SECRET.search(name))


def worker_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a reward worker.

    Args:
        named: More variables to pass on, if they are set.
    """
    named = set(named)
    return {
        name: value for name, value in os.environ.items() if name in named or passed(name, value)
    }


def hide_environment() -> None:
    """Blank the values in `/proc/<this process>/environ` that reward workers do not get.

    That file shows the memory in which the process received its environment, and processes of the
    same user can read it. The variables themselves keep their values, in this process and in those
    that it starts. Linux only.
    """
    if sys.platform != "linux":
        return
    try:
        block, _ = list(_initial_block()), list(_addresses())
    except (OSError, ValueError):  # no /proc, or another C library
        return
    hidden = [(at, name, value) for at, name, value in block if value and not passed(name, value)]
    if not hidden:
        return
    for variable, value in os.environ.items():
        os.putenv(variable, value)  # moves it out of the block
    used = set(_addresses())
    for at, name, value in hidden:
        if at not in used:
            start = at + len(os.fsencode(name)) + 1
            ctypes.memset(start, 0, len(os.fsencode(value)))


def _initial_block() -> Iterator[tuple[int, str, str]]:
    """Yield address, name and value of each variable that this process was started with."""
    # split behind the command, which may contain anything; fields 50 and 51 of the whole line
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    if not 0 < start < end:  # the kernel hides them
        return
    for entry in re.finditer(rb"([^=\0]+)=([^\0]*)", ctypes.string_at(start, end - start)):
        yield start + entry.start(), os.fsdecode(entry[1]), os.fsdecode(entry[2])


def _addresses() -> Iterator[int]:
    """Yield the addresses of the variables in C's `environ`."""
    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    index = 0
    while variables and (address := variables[index]):
        yield address
        index += 1
