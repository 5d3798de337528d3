"""Decode completions: vLLM, transformers or simulated, in a process, a Ray actor or several.

Imports `types`, `_lazy`, `settings`, `text`, `processes`, `ranks`, `scheduling`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy

if TYPE_CHECKING:
    from lit_rlsched.engines.process_engine import ProcessEngine
    from lit_rlsched.engines.ray_engine import RayEngine
    from lit_rlsched.engines.simulated import SimulatedEngine
    from lit_rlsched.engines.spec import EngineSpec
    from lit_rlsched.engines.transformers import TransformersEngine
    from lit_rlsched.engines.vllm import VLLMEngine

__all__ = [
    "EngineSpec",
    "ProcessEngine",
    "RayEngine",
    "SimulatedEngine",
    "TransformersEngine",
    "VLLMEngine",
]

# an engine's library may be missing or slow to import
__getattr__ = lazy(
    __name__,
    {
        "EngineSpec": "spec",
        "ProcessEngine": "process_engine",
        "RayEngine": "ray_engine",
        "SimulatedEngine": "simulated",
        "TransformersEngine": "transformers",
        "VLLMEngine": "vllm",
    },
)
