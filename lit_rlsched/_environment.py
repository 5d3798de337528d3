"""Which environment variables reward workers are given, and hiding the others from them."""

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
"""What Python, its packages and the programs that functions start need to run."""
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
"""How the network is reached: passed unless a password stands in them."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


def passed(name: str, value: str) -> bool:
    """Whether every reward worker is given this variable."""
    if name in PROXIES:
        return "@" not in value
    return name in PASSED or (name.startswith(PASSED_PREFIXES) and not _SECRET.search(name))


def worker_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a reward worker: what it cannot do without, and what it was promised.

    Args:
        named: Variables that are passed as well, where they are set.
    """
    named = set(named)
    return {
        name: value for name, value in os.environ.items() if name in named or passed(name, value)
    }


def hide_environment() -> None:
    """Blank the values of `/proc/<this process>/environ` that reward workers are not given.

    That file is the block of memory in which the process was handed its environment, and processes
    of the same user may read it. The variables themselves stay as they are, for this process and
    for those that it starts. Linux only.
    """
    if sys.platform != "linux":
        return
    try:
        block, _ = list(_initial_block()), list(_addresses())
    except (OSError, ValueError):  # no /proc, so nobody can read it there; or another C library
        return
    hidden = [(at, name, value) for at, name, value in block if value and not passed(name, value)]
    if not hidden:
        return
    for variable, value in os.environ.items():
        os.putenv(variable, value)  # which moves it out of the block
    used = set(_addresses())
    for at, name, value in hidden:
        if at not in used:
            start = at + len(os.fsencode(name)) + 1
            ctypes.memset(start, 0, len(os.fsencode(value)))


def _initial_block() -> Iterator[tuple[int, str, str]]:
    """Address, name and value of each variable this process was started with."""
    # behind the command, which may hold anything; these are fields 50 and 51 of the whole line
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    if not 0 < start < end:  # the kernel does not say
        return
    for entry in re.finditer(rb"([^=\0]+)=([^\0]*)", ctypes.string_at(start, end - start)):
        yield start + entry.start(), os.fsdecode(entry[1]), os.fsdecode(entry[2])


def _addresses() -> Iterator[int]:
    """Where the variables of C's `environ` lie."""
    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    index = 0
    while variables and (address := variables[index]):
        yield address
        index += 1
