"""A plugin with which vLLM's build for CPU runs its second model runner, the one of GPUs.

vLLM's CPU worker has this runner for machines with Triton's backend for CPU. Where that is missing,
Triton's interpreter takes its place: `pytest -p second_runner` runs vLLM's own runner, sampler and
Triton kernels on tensors of the CPU. Attention is the CPU's, and there are no CUDA graphs. Top-k
and top-p are vLLM's version in PyTorch: their kernel loops in a way the interpreter cannot.
"""

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from triton.backends import backends


def pytest_sessionstart() -> None:
    # what vLLM looks for before it uses Triton on a CPU; the interpreter needs no driver
    driver: Any = SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", SimpleNamespace(driver=driver))  # type: ignore[arg-type]
    import_module("lit_rlsched.engines._vllm_guest").import_vllm()
    sampler: Any = import_module("vllm.v1.sample.ops.topk_topp_sampler")
    assert sampler.HAS_TRITON
    sampler.HAS_TRITON = False
