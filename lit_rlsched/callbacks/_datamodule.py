"""How callbacks find the data module they configure."""

from lightning import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.datamodule import RolloutDataModule


def rollout_datamodule(
    trainer: Trainer, callback: Callback, only: bool = False
) -> RolloutDataModule:
    """The run's `RolloutDataModule`.

    Args:
        trainer: The callback's.
        callback: Which asks.
        only: Whether a second callback of its kind would overrule the first.

    Raises:
        MisconfigurationException: there is none, or a second callback.
    """
    name = type(callback).__name__
    callbacks = trainer.callbacks if only else []  # type: ignore[attr-defined]
    alike = sum(type(c) is type(callback) for c in callbacks)
    if alike > 1:
        raise MisconfigurationException(
            f"The Trainer has {alike} callbacks `{name}`, of which one would overrule the "
            "other. Remove all but one; an overlay with `callbacks+:` adds to those of the base."
        )
    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, RolloutDataModule):
        raise MisconfigurationException(
            f"`{name}` works on rollouts, but the data module is a "
            f"`{type(datamodule).__name__}`. Fit with `datamodule=RolloutDataModule(...)`, or "
            "remove the callback."
        )
    return datamodule
