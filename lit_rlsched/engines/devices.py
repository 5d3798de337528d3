"""The node's GPUs and cores: what a run on a GPU needs, and which of them each engine gets.

Run as a script, this prints the build of vLLM that `make install` installs: `cuda`, `cpu` or
`none`. The script needs only Python's standard library.
"""

import gc
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lit_rlsched.engines.spec import EngineSpec

DRIVER = 580
"""Oldest driver branch for CUDA 13, that of the wheels of `vllm>=0.27.1,<0.33` and of the PyTorch
that they pin."""


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None if `nvidia-smi` lists no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    versions = done.stdout.split()
    return versions[0] if done.returncode == 0 and versions else None


def unseen(driver: str | None, cuda: str | None) -> str | None:
    """Explain why PyTorch sees no GPU although `nvidia-smi` lists one."""
    if driver is None:
        return None
    lists = "`nvidia-smi` lists a GPU, but PyTorch sees none: "
    if cuda is None:
        return f"{lists}it is a CPU build."
    return f"{lists}`python -c 'import torch; torch.cuda.init()'` prints the reason."


def unseen_gpu() -> str | None:
    """Explain why PyTorch sees no GPU if there is one that `CUDA_VISIBLE_DEVICES` does not hide."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available():
        return None
    return unseen(driver(), torch.version.cuda)


def refuse_unseen_gpu(accelerator: object) -> None:
    """Refuse to run on a GPU that PyTorch does not see, with the reason, which Lightning omits."""
    from lit_rlsched.settings import UsageError

    if accelerator in ("gpu", "cuda") and (why := unseen_gpu()):
        raise UsageError(f"`trainer.accelerator={accelerator}`: {why}")


def refuse_missing_gpus(accelerator: object, devices: object) -> None:
    """Refuse more GPUs than this machine has; Lightning's message does not name the setting."""
    import torch

    from lit_rlsched.settings import UsageError

    if accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return
    there, named = torch.cuda.device_count(), str(devices).strip("[]")
    if "," in named or isinstance(devices, list):  # indices
        wanted = max((int(index) for index in named.split(",") if index.strip()), default=-1) + 1
    else:
        wanted = int(named) if named.isdigit() else 0
    if wanted > there:
        raise UsageError(
            f"`trainer.devices={devices}`: this machine has {there} GPU{'s' * (there > 1)}. Use "
            f"{there} or less, or `auto` for all."
        )


def warn_of_unseen_gpu(device: str) -> None:
    """Warn if the run is on the CPU although there is a GPU and PyTorch is a CUDA build."""
    import torch

    if device == "cpu" and torch.version.cuda and (why := unseen_gpu()):
        warnings.warn(f"The run is on the CPU. {why}", stacklevel=3)


def build() -> str:
    """Return the build of vLLM for this machine; stderr tells what keeps a GPU from being used."""
    if sys.platform != "linux":
        return "none"
    found = driver()
    if found is None:
        return "cpu"
    branch = found.partition(".")[0]
    if branch.isdecimal() and int(branch) < DRIVER:
        print(
            f"This machine has a GPU, but vLLM's CUDA build needs driver {DRIVER} or newer, and "
            f"the driver is {found}: the CPU build is installed. To use the GPU, update the "
            "driver, remove `.venv` and install again. `make BUILD=cuda` skips this check.",
            file=sys.stderr,
        )
        return "cpu"
    return "cuda"


def available_cores() -> list[int]:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_devices(device_type: str) -> int:
    """Number of this node's devices: GPUs, or on CPU the cores that this process may use."""
    if device_type == "cuda":
        import torch

        return torch.cuda.device_count()
    return len(available_cores())


def cores_of(spec: "EngineSpec", cores: list[int]) -> list[int]:
    """Return the cores of an engine: an equal share; all, if there are fewer cores than engines."""
    each = len(cores) // spec.engines
    return cores[spec.index * each : (spec.index + 1) * each] if each else cores


def variables_of(
    spec: "EngineSpec", tensor_parallel_size: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that let an engine's process see only its own GPUs."""
    if spec.engines + spec.first_gpu == 1 or spec.device.type != "cuda":
        return {}
    first = spec.first_gpu + spec.index * tensor_parallel_size
    gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpus = gpus or [str(gpu) for gpu in range(first + tensor_parallel_size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + tensor_parallel_size])}


def check_devices(spec: "EngineSpec", tensor_parallel_size: int) -> None:
    """Refuse more engines than the node has GPUs for."""
    if spec.device.type != "cuda":
        return
    gpus = num_devices("cuda")
    if spec.first_gpu + spec.engines * tensor_parallel_size > gpus:
        each = f" of {tensor_parallel_size} GPUs each" if tensor_parallel_size > 1 else ""
        trainers = f", of which the trainer has {spec.first_gpu}" if spec.first_gpu else ""
        most = (gpus - spec.first_gpu) // tensor_parallel_size
        from lit_rlsched.settings import UsageError

        raise UsageError(
            f"`num_engines={spec.engines}`: an engine{each} needs GPUs of its own, and this node "
            f"has {gpus}{trainers}. "
            + (f"Use {most} or less." if most > 0 else "Leave `weight_transfer='nccl'` out.")
        )


def give_back(device: "torch.device | None") -> None:
    """Empty PyTorch's CUDA cache in the trainer's process, so that the engine gets the memory.

    An engine that wakes up does this itself, in the process of its model.
    """
    if device is not None and device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    print(build())
