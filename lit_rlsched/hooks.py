"""Rollout hooks of callbacks and modules."""

from typing import Any

from lightning import Trainer


def fire_in_module(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call a rollout hook of the module only, on a rank that does not draw."""
    module = trainer.lightning_module
    if (method := getattr(module, hook, None)) is not None:
        method(*args)


def fire(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call a rollout hook of every callback that has it, then of the module."""
    module = trainer.lightning_module
    for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]
        if (method := getattr(owner, hook, None)) is not None:
            name = f"[{type(owner).__name__}].{hook}"
            with trainer.profiler.profile(name):  # type: ignore[attr-defined]
                if owner is module:
                    method(*args)
                else:
                    method(trainer, module, *args)
