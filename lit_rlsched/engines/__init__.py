"""Decode completions: vLLM, transformers or simulated, in a process, a Ray actor or several.

An engine (`base.py` is the interface) has its slots and no schedule. Before a round it gets the
policy's weights (`sync_weights`). Then requests are submitted, each `step` draws a token for every
running one, and its events have the tokens with their log-probs. A worker (`rollout_worker.py`)
refills free slots between two steps. `ProcessEngine` and `RayEngine` have an engine in another
process (`child.py`), whose worker runs ahead there (`remote.py`); `EnginePool` is several as one.

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
