"""How callbacks find the data module they configure."""

from lightning import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.datamodule import RolloutDataModule


def rollout_datamodule(trainer: Trainer, callback: Callback) -> RolloutDataModule:
    """The run's `RolloutDataModule`.

    Raises:
        MisconfigurationException: there is none.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, RolloutDataModule):
        raise MisconfigurationException(
            f"`{type(callback).__name__}` works on rollouts, but the data module is a "
            f"`{type(datamodule).__name__}`. Fit with `datamodule=RolloutDataModule(...)`, or "
            "remove the callback."
        )
    return datamodule
