"""What forks of the tests begin with: all imports, and what vLLM's CPU build does at each start.

Importing this module does it: half a minute for all but the first time.
"""

import contextlib
import sys
from importlib import import_module

from forked import wrap_kernels_once

IMPORTS = [
    "lit_rlsched.cli.main",
    "lit_rlsched.callbacks.report",
    "pandas",  # pyarrow imports it
    "wandb",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.qwen3.modeling_qwen3",
    "resumable_run",
    "vllm.v1.engine.llm_engine",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
]
if __name__ == "__main__":  # the other processes find them compiled
    IMPORTS += ["ray", "peft", "hypothesis"]

for name in IMPORTS:
    with contextlib.suppress(ImportError):  # vLLM and Ray may be missing
        import_module(name)
wrap_kernels_once()
if (vllm := sys.modules.get("vllm.platforms")) is not None:
    vllm.current_platform.register_triton_kernel_overrides()
