"""Pictures of a run, as matplotlib figures."""

from collections.abc import Mapping

from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure

from lit_rlsched.callbacks.pictures.learning import learning_curve
from lit_rlsched.callbacks.pictures.lengths import length_histogram
from lit_rlsched.callbacks.pictures.timeline import slot_timeline
from lit_rlsched.callbacks.pictures.waits import waits
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.saving.run_folder import folder_of
from lit_rlsched.training.round import Round

__all__ = ["draw", "learning_curve", "length_histogram", "publish", "slot_timeline", "waits"]


def draw(record: RunRecord, last: Round | None, name: str) -> dict[str, Figure]:
    """Return all pictures that there is data for, by name.

    Args:
        record: What the run has measured.
        last: The round that was drawn last.
        name: The run's name.
    """
    figures = {}
    if record.rounds:
        figures["learning"] = learning_curve(name, record.rounds, record.validations)
    if last is not None:
        figures["lengths"] = length_histogram(last)
        if last.trace is not None and last.trace.steps["end"]:
            figures["timeline"] = slot_timeline(last)
    return figures


def publish(figures: Mapping[str, Figure], trainer: Trainer) -> None:
    """Save pictures in the run's folder, and send them to W&B and TensorBoard."""
    for name, figure in figures.items():
        path, step = folder_of(trainer) / f"{name}.png", trainer.global_step
        figure.savefig(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(f"pictures/{name}", [str(path)], step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(f"pictures/{name}", figure, step)
