"""`--ckpt_path=best`: which one it was is known only to the process that trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def refuse_best(ckpt_path: Any, trainer: Trainer) -> None:
    """Name the files there are.

    Raises:
        ValueError: `best` was asked for.
    """
    if ckpt_path != "best":
        return
    found = [str(path) for path in _checkpoints(trainer)]
    there = f"There are {', '.join(found)}" if found else "None is found beside this configuration"
    raise ValueError(
        "`--ckpt_path=best`: which checkpoint is the best is known only while `fit` runs. Give "
        f"its file, or `last`. {there}."
    )


def _checkpoints(trainer: Trainer) -> Iterator[Path]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        folder = getattr(callback, "dirpath", None)
        if isinstance(callback, ModelCheckpoint) and folder:
            yield from sorted(Path(folder).glob("*.ckpt"))
