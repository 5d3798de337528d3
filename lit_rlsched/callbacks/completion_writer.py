"""Writes predicted completions to a file."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks.rollout_callback import run_of
from lit_rlsched.settings import RemembersInit, UsageError
from lit_rlsched.text import printable


class CompletionWriter(RemembersInit, BasePredictionWriter):
    """Write the completions of `predict` to a file, one row each, as JSON lines or Parquet.

    On by default in the CLI. The file gets its name once it is complete; until then its rows are
    JSON lines in `NAME.tmp`.

    A value that JSON does not know, such as a date, is text. A Parquet file has a column for each
    that any row has. If the values of a column have no common type (text and numbers, texts beside
    chats), the rows stay JSON lines, in `NAME.jsonl`.

    See `docs/howto/validate_and_predict.md`.

    Args:
        path: File, whose suffix `.jsonl` or `.parquet` decides the format. By default
            `predictions.jsonl` in the Trainer's `default_root_dir`.

    Raises:
        UsageError: the suffix is unknown.

    Example::

        trainer = Trainer(callbacks=[CompletionWriter("answers.parquet")])
        trainer.predict(module, datamodule=RolloutDataModule(..., predict_data="prompts.jsonl"))
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__("batch")
        if path is not None and Path(path).suffix not in (".jsonl", ".parquet"):
            raise UsageError(f"`CompletionWriter({path=})`: use a name in .jsonl or .parquet.")
        self.path = path
        self.num_completions = 0
        """Number of completions written."""

    def file(self, trainer: Trainer) -> Path:
        """Return the path of the file."""
        default = Path(trainer.default_root_dir) / "predictions.jsonl"
        return default if self.path is None else Path(self.path)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the writer; refuse another data module than `RolloutDataModule`."""
        if stage == "predict":
            run_of(trainer, self)
            self.num_completions = 0

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, prediction: Any, *_: Any
    ) -> None:
        """Append the rows of a prompt as JSON lines, which may become Parquet at the end."""
        begun, path = self.num_completions > 0, self.file(trainer)
        self.num_completions += len(prediction)
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.tmp")
            with unfinished.open("a" if begun else "w", encoding="ascii") as file:
                file.writelines(_line(row) + "\n" for row in prediction)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the file and give it its name."""
        if not self.num_completions or not trainer.is_global_zero:
            return
        path = self.file(trainer)
        unfinished = path.with_name(f"{path.name}.tmp")
        if path.suffix == ".parquet":
            part = path.with_name(f"{path.name}.part")
            try:
                import pyarrow as pa
                import pyarrow.parquet as pq

                with unfinished.open(encoding="ascii") as file:
                    rows: list[dict[str, Any]] = [printable(json.loads(line)) for line in file]
                names = dict.fromkeys(name for row in rows for name in row)
                columns = {name: [row.get(name) for row in rows] for name in names}
                pq.write_table(pa.table(columns), part)
            except Exception as error:  # what was computed is not lost
                with suppress(OSError):
                    part.unlink()
                os.replace(unfinished, path := path.with_name(f"{path.name}.jsonl"))
                why = f"{type(error).__name__}: {error}"
                rank_zero_warn(
                    f"The rows cannot be written as Parquet. They are in `{path}`. ({why})"
                )
                return
            unfinished.unlink()
            unfinished = part
        os.replace(unfinished, path)


def _line(row: Mapping[str, Any]) -> str:
    cells = []
    for name, value in row.items():
        try:
            cell = json.dumps(value, default=str)
        except (TypeError, ValueError, RecursionError):  # a key that is no text, or a circle
            cell = json.dumps(str(value))
        cells.append(f"{json.dumps(str(name))}: {cell}")
    return "{" + ", ".join(cells) + "}"
