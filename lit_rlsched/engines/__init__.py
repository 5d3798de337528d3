"""Engines that decode rollouts, all with the interface of `engines/base.py`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlsched.engines.process_engine import ProcessEngine
    from lit_rlsched.engines.simulated import SimulatedEngine
    from lit_rlsched.engines.transformers import TransformersEngine
    from lit_rlsched.engines.vllm import VLLMEngine

__all__ = ["ProcessEngine", "SimulatedEngine", "TransformersEngine", "VLLMEngine"]

_HOMES = {
    "ProcessEngine": "process_engine",
    "SimulatedEngine": "simulated",
    "TransformersEngine": "transformers",
    "VLLMEngine": "vllm",
}


def __getattr__(name: str) -> Any:
    """Import an engine on first use: its library may be missing or slow to import."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
