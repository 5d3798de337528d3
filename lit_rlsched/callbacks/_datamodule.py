"""Access of callbacks to the data module and the schedule."""

from lightning import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.schedule import RunFacts, Schedule, check_pairs


def rollout_datamodule(trainer: Trainer, callback: Callback) -> RolloutDataModule:
    """Return the run's `RolloutDataModule`.

    Raises:
        MisconfigurationException: there is none.
    """
    name = type(callback).__name__
    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, RolloutDataModule):
        raise MisconfigurationException(
            f"`{name}` needs rollouts, but the data module is a `{type(datamodule).__name__}`. "
            "Fit with `datamodule=RolloutDataModule(...)`, or remove the callback."
        )
    return datamodule


def rollout_schedule(trainer: Trainer, callback: Callback) -> tuple[Schedule, RunFacts]:
    """Return the run's schedule, for a callback to set a field of it, and facts about the run.

    Raises:
        MisconfigurationException: there is no `RolloutDataModule`, or another callback decides the
            same.
        ValueError: two callbacks of the Trainer do not work together.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    setting = getattr(callback, "sets", None)
    alike = [c for c in callbacks if setting and getattr(c, "sets", None) == setting]
    if len(alike) > 1:
        names = " and ".join(f"`{type(c).__name__}`" for c in alike)
        raise MisconfigurationException(
            f"The Trainer has {len(alike)} callbacks that decide {setting}: {names}. Remove all "
            "but one. A configuration with `callbacks+:` adds to the callbacks of the earlier ones."
        )
    datamodule = rollout_datamodule(trainer, callback)
    facts = RunFacts.of(datamodule)
    check_pairs(facts.callbacks)
    return datamodule.schedule, facts
