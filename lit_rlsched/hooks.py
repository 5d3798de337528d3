"""How a rollout tells callbacks and module what happens in it."""

from typing import Any

from lightning import Trainer


def fire(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call a rollout hook on every callback that has it, and on the module."""
    for owner in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
        if (method := getattr(owner, hook, None)) is not None:
            with trainer.profiler.profile(  # type: ignore[attr-defined]
                f"[{type(owner).__name__}].{hook}"
            ):
                if owner is trainer.lightning_module:
                    method(*args)
                else:
                    method(trainer, trainer.lightning_module, *args)
