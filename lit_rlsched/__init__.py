"""Scheduled rollouts for reinforcement-learning post-training inside the Lightning Trainer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule
    from lit_rlsched.module import GRPOModule, RLOOModule

__all__ = ["GRPOModule", "RLOOModule", "RolloutDataModule", "__version__"]
__version__ = "0.1.0"

_HOMES = {"GRPOModule": "module", "RLOOModule": "module", "RolloutDataModule": "datamodule"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that reward workers need not import torch and Lightning."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
