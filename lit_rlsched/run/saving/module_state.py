"""Policy, optimizer and the best models in checkpoints, checked before they are loaded."""

import json
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lit_rlsched.run.advice import restored_settings
from lit_rlsched.run.saving.resuming import (
    check_resumable,
    check_same_adapter,
    check_same_origin,
    check_same_weights,
)
from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import ADAPTER, base_model
from lit_rlsched.training.optimizers import is_fused, keep_step
from lit_rlsched.training.precision import main_dtype
from lit_rlsched.training.shared_prefix import Sharing


class PolicyCheckpoints(LightningModule):
    """Saves the policy, or only its adapters, because their base never changes."""

    model: nn.Module | None
    _sharing: Sharing
    _origin: dict[str, Any]
    """What the policy was made from; see `origin`."""
    _resumed: dict[str, Any] | None = None
    """The checkpoint, until its optimizer state has been adopted."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the base of adapters, and add facts that weights do not show."""
        assert self.model is not None
        checkpoint["shared_prefix"] = self._sharing.works
        base = base_model(self.model).named_parameters()
        dtype = main_dtype(p for name, p in base if "lora_" not in name)
        checkpoint["policy"] = {"module": type(self).__name__, "dtype": str(dtype)}
        checkpoint["policy"] |= {"origin": self._origin, "adapter": self._adapter_config()}
        if "optimizer_states" in checkpoint and self.trainer.optimizers:
            checkpoint["policy"]["optimizer"] = weights_of(self.trainer.optimizers[0], self)
        keys = self._saved_keys()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in keys}

    def _adapter_config(self) -> Any:
        if not self.hparams["lora_rank"]:
            return None
        config: Any = self.model.peft_config[ADAPTER]  # type: ignore[union-attr, index]
        return json.loads(json.dumps(config.to_dict(), default=sorted))

    @property
    def _fits(self) -> bool:
        return self._trainer is not None and self.trainer.state.fn == "fit"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check a checkpoint before it is loaded; see `check_checkpoint`."""
        if "state_dict" in checkpoint:  # FSDP2 has loaded its part by now
            self.check_checkpoint(checkpoint)
            if self._fits:
                fused = is_fused(self.hparams["optim"], self.trainer.strategy.root_device.type)
                keep_step(checkpoint, fused)
                self._resumed = checkpoint
        self._sharing.works = checkpoint.get("shared_prefix")

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Check the policy's weights and optimizer state in a checkpoint.

        Raises:
            ValueError: If names or shapes of the weights differ, the adapters' settings or their
                base, or the reference model, or if a fit is to resume from a checkpoint that holds
                only weights.
        """
        if self._fits:
            check_resumable(checkpoint)
        keys = self._saved_keys()
        ours = {k: v for k, v in self.state_dict().items() if k in keys}
        check_same_weights(ours, checkpoint["state_dict"])
        about = checkpoint.get("policy", {})
        check_same_adapter(about.get("adapter"), self._adapter_config())
        saved = about.get("origin", {})
        if check_same_origin(saved, self._origin, self.hparams, self._fits):
            self._origin = saved

    def adopt_optimizer(
        self, optimizer: Optimizer, state: Mapping[str, Any], checkpoint: Mapping[str, Any]
    ) -> None:
        """Group the weights as a checkpoint's optimizer, which must be one of the same weights."""
        if (text := restored_settings(self.hparams, state["param_groups"])) is not None:
            rank_zero_warn(text)
        ours, saved = weights_of(optimizer, self), checkpoint["policy"]["optimizer"]
        if saved["class"] != ours["class"]:
            raise UsageError(
                f"The checkpoint has the state of the optimizer `{saved['class']}`, and this run "
                f"has `{ours['class']}`. Return the former from `configure_optimizers`, or start "
                "a new run from the exported weights."
            )
        theirs, named = saved["groups"], list(chain(*ours["groups"]))
        if other := sorted({*chain(*theirs)}.symmetric_difference(named)):
            raise UsageError(
                f"The checkpoint was made while other weights were trained: {len(other)} differ, "
                f"the first is `{other[0]}`. Freeze weights as the run did, or start a new run "
                "from the exported weights."
            )
        if theirs != ours["groups"]:
            parameters = chain(*(group["params"] for group in optimizer.param_groups))
            weights = dict(zip(named, parameters, strict=True))
            optimizer.param_groups = [
                {**optimizer.param_groups[0], "params": [weights[name] for name in names]}
                for names in theirs
            ]

    def on_fit_start(self) -> None:
        """Make ready for the checkpoint's optimizer state, which Lightning loads next."""
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is not None and self.trainer.ckpt_path is not None:
            state = checkpoint["optimizer_states"][0]
            self.adopt_optimizer(self.trainer.optimizers[0], state, checkpoint)

    def _saved_keys(self) -> set[str]:
        if self.hparams["lora_rank"]:
            return {name for name, p in self.named_parameters() if p.requires_grad}
        return set(self.state_dict())


def without_base(module: PolicyCheckpoints, keys: Any) -> None:
    """Let a checkpoint of the adapters alone pass as complete."""
    saved = module._saved_keys()
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in saved]


def weights_of(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the class of an optimizer, and the names of the weights in its groups."""
    names, number = {id(p): name for name, p in module.named_parameters()}, count()
    groups = [
        [names.get(id(p)) or f"not of the module {next(number)}" for p in group["params"]]
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


class CallbackStates(Callback):
    """Restores what `ModelCheckpoint` knows of files, before the callback loads its state."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say where the files are now."""
        states = checkpoint.get("callbacks", {})
        for callback in trainer.checkpoint_callbacks:
            key = callback.state_key
            if isinstance(callback, ModelCheckpoint) and key in states:
                at = str(callback.dirpath), str(trainer.ckpt_path)
                states[key] = found_again(states[key], *at)


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
