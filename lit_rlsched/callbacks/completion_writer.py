"""Writes predicted completions to a file."""

import json
import os
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lit_rlsched.callbacks.rollout_callback import run_of
from lit_rlsched.settings import RemembersInit, UsageError
from lit_rlsched.text import as_text


class CompletionWriter(RemembersInit, BasePredictionWriter):
    """Write the completions of `predict` to a file, one row each, as JSON lines or Parquet.

    On by default in the CLI. The file gets its name once it is complete; until then its name ends
    in `.tmp`.

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
        self._rows: list[dict[str, Any]] = []

    def file(self, trainer: Trainer) -> Path:
        """Return the path of the file."""
        default = Path(trainer.default_root_dir) / "predictions.jsonl"
        return default if self.path is None else Path(self.path)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the writer.

        Raises:
            UsageError: there is no `RolloutDataModule`.
        """
        if stage == "predict":
            run_of(trainer, self)
            self._rows, self.num_completions = [], 0

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, prediction: Any, *_: Any
    ) -> None:
        """Append the rows of a prompt to a JSONL file, or keep them for a Parquet file."""
        self.num_completions += len(prediction)
        if not trainer.is_global_zero:
            return
        if self.file(trainer).suffix == ".parquet":
            self._rows += prediction
            return
        begun = self.num_completions > len(prediction)
        with self._unfinished(trainer).open("a" if begun else "w", encoding="ascii") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in prediction)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the file and give it its name."""
        if not self.num_completions or not trainer.is_global_zero:
            return
        unfinished = self._unfinished(trainer)
        if self._rows:
            import pyarrow as pa
            import pyarrow.parquet as pq

            # calls have arguments of any type, and a column has one
            rows = [{**row, "completion": as_text(row["completion"])} for row in self._rows]
            pq.write_table(pa.Table.from_pylist(rows), unfinished)
            self._rows = []
        os.replace(unfinished, self.file(trainer))

    def _unfinished(self, trainer: Trainer) -> Path:
        path = self.file(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.name}.tmp")
