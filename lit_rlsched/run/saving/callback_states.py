"""States of Lightning's callbacks that it does not restore as they were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.settings import UsageError

_TRAINED = "trained_weights"
"""Key of a checkpoint: names of the weights that were not frozen."""


class CallbackStates(Callback):
    """Restores what `ModelCheckpoint` knows of files, and which weights `BaseFinetuning` thawed."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note which weights are trained."""
        if [*_finetuning(trainer)]:
            named = pl_module.named_parameters()
            checkpoint[_TRAINED] = [name for name, p in named if p.requires_grad]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Change the states before the callbacks load them.

        Raises:
            UsageError: weights have to be thawed that are sharded already.
        """
        states = checkpoint.get("callbacks", {})
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                state = states[callback.state_key]
                states[callback.state_key] = found_again(
                    state, str(callback.dirpath), str(trainer.ckpt_path)
                )
        saved = [states[c.state_key] for c in _finetuning(trainer) if c.state_key in states]
        if saved:
            _thaw(trainer, pl_module, checkpoint.get(_TRAINED, _optimized(saved)))


def found_again(state: dict[str, Any], folder: str, checkpoint: str) -> dict[str, Any]:
    """Return the state of a `ModelCheckpoint` with the paths that its files have now.

    The folder may have another name than when the state was saved: relative or absolute, through a
    link, moved or copied. With another folder, Lightning would forget the best models.
    """
    before = Path(str(state.get("dirpath")))

    def now(path: str) -> str:
        inside = Path(path).relative_to(before) if Path(path).is_relative_to(before) else Path(path)
        places = (Path(folder, inside), Path(path), Path(checkpoint).parent / inside)
        return str(next((p.absolute() for p in places if path and p.exists()), path))

    paths = ("best_model_path", "kth_best_model_path", "last_model_path")
    found = {name: now(state[name]) for name in paths if name in state}
    models = {now(path): score for path, score in state.get("best_k_models", {}).items()}
    best = found["best_model_path"]
    if best and "://" not in best and not Path(best).exists():
        rank_zero_warn(
            f"The best checkpoint so far, `{best}`, is no longer there. Its score stays the one to "
            "beat."
        )
    return {**state, **found, "best_k_models": models, "dirpath": folder}


def _finetuning(trainer: Trainer) -> Iterator[BaseFinetuning]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (callback for callback in callbacks if isinstance(callback, BaseFinetuning))


def _optimized(states: list[dict[str, Any]]) -> list[str]:
    """Return the names of the weights that were in the optimizers."""
    optimizers = [state.get("internal_optimizer_metadata", {}) for state in states]
    groups = [group for of in optimizers for groups in of.values() for group in groups]
    return [name for group in groups for name in group["params"]]


def _thaw(trainer: Trainer, module: LightningModule, names: list[str]) -> None:
    """Train weights that the callback has frozen again in `setup`."""
    weights = dict(module.named_parameters())
    frozen = [name for name in names if name in weights and not weights[name].requires_grad]
    if frozen and trainer.strategy.restore_checkpoint_after_setup:
        raise UsageError(
            f"`BaseFinetuning` had thawed `{frozen[0]}` before the checkpoint, and with "
            f"`strategy={type(trainer.strategy).__name__}` the optimizer cannot get it back. "
            "Resume with `strategy='ddp'` or on one device."
        )
    for name in frozen:
        weights[name].requires_grad_(True)
