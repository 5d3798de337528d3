"""Whether this machine has what a run on its NVIDIA GPU needs: the driver, and Triton's tools.

As a script it prints the build of vLLM that `make install` takes: `cuda`, `cpu` or `none`. It needs
nothing but Python for that.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

CUDA = 13
"""Of the wheels that `vllm>=0.27.1,<0.33` and the PyTorch it pins are built for."""
DRIVERS = {12: 525, 13: 580}
"""CUDA -> the oldest branch of the driver that runs it (NVIDIA's notes on minor version
compatibility)."""


def driver() -> str | None:
    """Version of NVIDIA's driver; None where `nvidia-smi` lists no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    versions = said.stdout.split()
    return versions[0] if said.returncode == 0 and versions else None


def too_old(driver: str, cuda: int) -> int | None:
    """The driver that this CUDA needs, where this one is older."""
    needed = DRIVERS.get(cuda)
    branch = driver.partition(".")[0]
    return needed if needed and branch.isdecimal() and int(branch) < needed else None


def unseen(driver: str | None, cuda: str | None) -> str | None:
    """Why PyTorch sees no GPU where `nvidia-smi` does.

    Args:
        driver: As `driver` says.
        cuda: What PyTorch was built for; None: a build for CPU.
    """
    if driver is None:
        return None
    lists = "`nvidia-smi` lists a GPU, and PyTorch sees none: "
    if cuda is None:
        return f"{lists}it is a build for CPU."
    if needed := too_old(driver, int(cuda.partition(".")[0])):
        return (
            f"{lists}it is built for CUDA {cuda}, which needs driver {needed} or newer, and this "
            f"is {driver}. Update the driver."
        )
    return f"{lists}`python -c 'import torch; torch.cuda.init()'` says why."


def unseen_gpu() -> str | None:
    """Why PyTorch sees no GPU on a machine that has one and does not hide it from this process."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available():
        return None
    return unseen(driver(), torch.version.cuda)


def refuse_unseen_gpu(accelerator: object) -> None:
    """Say more than Lightning where it would find no GPU.

    Raises:
        ValueError: a GPU is asked for, and PyTorch does not see the one there is.
    """
    if accelerator in ("gpu", "cuda") and (why := unseen_gpu()):
        raise ValueError(f"`trainer.accelerator={accelerator}`: {why}")


def warn_of_unseen_gpu(device: str) -> None:
    """Say why a run is on the CPU, where it need not be: not to who has installed PyTorch for it.

    Args:
        device: What the run is on.
    """
    import torch

    if device == "cpu" and torch.version.cuda and (why := unseen_gpu()):
        warnings.warn(f"The run is on the CPU. {why}", stacklevel=3)


def missing_tools() -> list[str]:
    """What Triton lacks to build the kernels that vLLM starts, each with what installs it."""
    missing = []
    if not os.environ.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        missing.append("a C compiler (`apt install gcc`, or set `CC`)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        missing.append(f"Python's headers ({header}; `apt install {python}-dev`)")
    return missing


def warn_of_missing_tools() -> None:
    """Say what Triton lacks; it may do without where it has built the same kernels before."""
    if missing := missing_tools():
        warnings.warn(
            f"vLLM on a GPU has Triton build kernels, which needs {' and '.join(missing)}.",
            stacklevel=3,
        )


def build() -> str:
    """The build of vLLM for this machine, said on stderr where it is not what it could be."""
    if sys.platform != "linux":
        return "none"
    found = driver()
    if found is None:
        return "cpu"
    if needed := too_old(found, CUDA):
        print(
            f"There is a GPU, but vLLM's build for it needs driver {needed} or newer, and this is "
            f"{found}: the CPU is used. For the GPU, update the driver, remove `.venv` and start "
            "again. `make BUILD=cuda` insists on it.",
            file=sys.stderr,
        )
        return "cpu"
    if missing := missing_tools():
        print(f"For the GPU, Triton needs {' and '.join(missing)}.", file=sys.stderr)
    return "cuda"


if __name__ == "__main__":
    print(build())
