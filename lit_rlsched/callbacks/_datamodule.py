"""How callbacks find the data module they configure."""

from lightning import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.datamodule import RolloutDataModule


def rollout_datamodule(trainer: Trainer, callback: Callback) -> RolloutDataModule:
    """The run's `RolloutDataModule`.

    Raises:
        MisconfigurationException: there is none, or another callback sets the same of it.
    """
    name, setting = type(callback).__name__, getattr(callback, "sets", None)
    callbacks = trainer.callbacks if setting else []  # type: ignore[attr-defined]
    alike = [c for c in callbacks if getattr(c, "sets", None) == setting]
    if len(alike) > 1:
        names = " and ".join(f"`{type(c).__name__}`" for c in alike)
        raise MisconfigurationException(
            f"The Trainer has {len(alike)} callbacks that decide {setting}: {names}. One would "
            "overrule the other: remove all but one. An overlay with `callbacks+:` adds to those "
            "of the base."
        )
    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, RolloutDataModule):
        raise MisconfigurationException(
            f"`{name}` works on rollouts, but the data module is a "
            f"`{type(datamodule).__name__}`. Fit with `datamodule=RolloutDataModule(...)`, or "
            "remove the callback."
        )
    return datamodule
