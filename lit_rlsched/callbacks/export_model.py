"""Writes the trained model as Hugging Face folders when training ends."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_rlsched.run.fsdp2 import FSDP2Strategy
from lit_rlsched.run.policy_module import PolicyModule
from lit_rlsched.run.run_config import log_artifact
from lit_rlsched.run.saving.checkpoints import CheckpointError, read_checkpoint
from lit_rlsched.run.saving.export import Dtype, check_arguments, export_state
from lit_rlsched.run.saving.run_folder import folder_of
from lit_rlsched.settings import RemembersInit, UsageError


class ExportModel(RemembersInit, Callback):
    """Export the last and the best model when `fit` ends, as `lit-rlsched export` does.

    The folders are `export/last` and `export/best` in the run's folder. The best model is that of
    the first `ModelCheckpoint` with a `monitor`; without one, only the last is exported. A run that
    is stopped exports nothing: use `lit-rlsched export`. With LoRA, the base is loaded once more
    into main memory to merge the adapters.

    See `docs/howto/export.md`.

    Args:
        adapter: Write the LoRA adapters as a PEFT folder instead of merging them into the base.
        dtype: Of the weights; see `lit_rlsched.export`.
        push_to_hub: Name of a repository on the Hub for the best model, or for the last one if
            there is no best.

    Raises:
        UsageError: an argument is wrong.

    Example::

        Trainer(callbacks=[ModelCheckpoint(monitor="val/accuracy", mode="max"), ExportModel()])
    """

    def __init__(
        self, adapter: bool = False, dtype: Dtype = "auto", push_to_hub: str | None = None
    ) -> None:
        check_arguments(dtype, push_to_hub)
        self.adapter = adapter
        self.dtype = dtype
        self.push_to_hub = push_to_hub

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that cannot be exported."""
        if stage != "fit":
            return
        if not isinstance(pl_module, PolicyModule):
            raise UsageError(
                f"`ExportModel` exports `GRPOModule` and `RLOOModule`, not "
                f"`{type(pl_module).__name__}`. Call `save_pretrained` of the model in it instead."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse `adapter=True` without adapters, which `model` may bring."""
        if self.adapter and not pl_module.hparams["lora_rank"]:
            raise UsageError(
                "`ExportModel(adapter=True)`: the run trains all weights (`lora_rank=0`), so there "
                "are no adapters. Leave `adapter` out, or set `lora_rank`."
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folders."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        strategy = trainer.strategy
        with strategy.gathered() if isinstance(strategy, FSDP2Strategy) else nullcontext():
            # on all ranks
            last = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if not trainer.is_global_zero:
            return
        folder, best = folder_of(trainer) / "export", _best(trainer)
        self._export(trainer, last, folder / "last", folder, hub=best is None)
        if best is not None:
            self._export(trainer, best, folder / "best", best, hub=True)

    def _export(
        self, trainer: Trainer, checkpoint: Any, out: Path, source: Path, hub: bool
    ) -> None:
        try:
            if isinstance(checkpoint, Path):
                checkpoint = read_checkpoint(checkpoint, optimizers=False)
            export_state(
                checkpoint,
                out,
                source=source,
                adapter=self.adapter,
                dtype=self.dtype,
                hub=self.push_to_hub if hub else None,
            )
            log_artifact(trainer, f"export-{out.name}", "model", out)
        except (OSError, RuntimeError, CheckpointError) as error:
            rank_zero_warn(f"The model in `{out}` is incomplete or not uploaded: {error}")
        else:
            rank_zero_info(f"The model is in `{out}`.")


def _best(trainer: Trainer) -> Path | None:
    """Return the file of the best checkpoint, by the first `ModelCheckpoint` with a monitor."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor and callback.best_model_path:
            return Path(callback.best_model_path)
    return None
