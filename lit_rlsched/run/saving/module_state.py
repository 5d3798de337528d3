"""Policy, optimizer and thawed weights in checkpoints, checked before they are loaded."""

import json
from collections.abc import Mapping
from itertools import chain, count
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lit_rlsched.run.advice import restored_settings
from lit_rlsched.run.saving.checkpoints import CheckpointError
from lit_rlsched.run.saving.resuming import (
    check_same_adapter,
    check_same_origin,
    check_same_weights,
)
from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import ADAPTER, base_model
from lit_rlsched.training.optimizers import is_fused, keep_step
from lit_rlsched.training.precision import main_dtype


class PolicyCheckpoints(LightningModule):
    """Saves the policy, or only its adapters, because their base never changes."""

    model: nn.Module | None
    _origin: dict[str, Any]
    """What the policy was made from; see `origin`."""
    _resumed: dict[str, Any] | None = None
    """The checkpoint, until its optimizer state has been adopted."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the base of adapters, and add facts that weights do not show."""
        assert self.model is not None
        base = base_model(self.model).named_parameters()
        dtype = main_dtype(p for name, p in base if "lora_" not in name)
        checkpoint["policy"] = {"module": type(self).__name__, "dtype": str(dtype)}
        checkpoint["policy"] |= {"origin": self._origin, "adapter": self._adapter_config()}
        if "optimizer_states" in checkpoint and self.trainer.optimizers:
            optimizer = self.trainer.optimizers[0]
            about = {"class": type(optimizer).__name__, "groups": _names(optimizer, self)}
            checkpoint["policy"]["optimizer"] = about
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

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse other weights, adapters, base or reference, and weights alone to resume a fit."""
        if self._fits and "optimizer_states" not in checkpoint:
            raise CheckpointError(
                "The checkpoint holds the weights alone "
                "(`ModelCheckpoint(save_weights_only=True)`), and a run cannot resume without the "
                "state of the optimizer. Resume from a checkpoint of the whole run."
            )
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
    ) -> dict[str, Any]:
        """Group the weights as a checkpoint does; return its state for the weights of this run."""
        if (text := restored_settings(self.hparams, state["param_groups"])) is not None:
            rank_zero_warn(text)
        about = checkpoint["policy"]["optimizer"]
        if about["class"] != type(optimizer).__name__:
            raise UsageError(
                f"The checkpoint has the state of the optimizer `{about['class']}`, and this run "
                f"has `{type(optimizer).__name__}`. Return the former from "
                "`configure_optimizers`, or start a new run from the exported weights."
            )
        ours, theirs, groups = _names(optimizer, self), about["groups"], state["param_groups"]
        if theirs == ours:
            return dict(state)
        parameters = chain(*(group["params"] for group in optimizer.param_groups))
        weights = dict(zip(chain(*ours), parameters, strict=True))
        place = {name: i for i, names in enumerate(theirs) for name in names}
        kept = [[name for name in names if name in weights] for names in theirs]
        for names in ours:  # what is new goes where the rest of its group went
            beside = next((place[name] for name in names if name in place), 0)
            kept[beside] += [name for name in names if name not in place]
        for changed, what in (
            ([name for name in weights if name not in place], "are trained now, with a new state"),
            ([name for name in place if name not in weights], "are trained no more"),
        ):
            if changed:
                rank_zero_warn(
                    f"The checkpoint was made while other weights were trained: {len(changed)} "
                    f"{what}; the first is `{changed[0]}`."
                )
        optimizer.param_groups = [
            {**optimizer.param_groups[0], "params": [weights[name] for name in names]}
            for names in kept
        ]
        old = dict(zip(chain(*theirs), chain(*(of["params"] for of in groups)), strict=True))
        new = {name: number for number, name in enumerate(chain(*kept))}
        known = {new[name]: state["state"].get(old.get(name)) for name in new}
        return {
            "state": {number: of for number, of in known.items() if of is not None},
            "param_groups": [
                {**group, "params": [new[name] for name in names]}
                for group, names in zip(groups, kept, strict=True)
            ],
        }

    def on_fit_start(self) -> None:
        """Adopt the checkpoint's optimizer state, which Lightning loads next."""
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is not None and self.trainer.ckpt_path is not None:
            states = checkpoint["optimizer_states"]
            states[:1] = [self.adopt_optimizer(self.trainer.optimizers[0], states[0], checkpoint)]

    def _saved_keys(self) -> set[str]:
        if self.hparams["lora_rank"]:
            return {name for name, p in self.named_parameters() if p.requires_grad}
        return set(self.state_dict())


def without_base(module: PolicyCheckpoints, keys: Any) -> None:
    """Let a checkpoint of the adapters alone pass as complete."""
    saved = module._saved_keys()
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in saved]


def _names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the names of the weights in an optimizer's groups."""
    names = {id(p): name for name, p in module.named_parameters()}
    number = count()
    return [
        [names.get(id(p)) or f"not of the module {next(number)}" for p in group["params"]]
        for group in optimizer.param_groups
    ]


_TRAINED = "trained_weights"
"""Key of a checkpoint: names of the weights that were not frozen."""


class ThawedWeights(Callback):
    """Lets a resumed run train the weights that `BaseFinetuning` had thawed."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note which weights are trained."""
        if _finetuning(trainer):
            named = pl_module.named_parameters()
            checkpoint[_TRAINED] = [name for name, p in named if p.requires_grad]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Thaw before the optimizer is made; refuse to thaw sharded weights."""
        states = checkpoint.get("callbacks", {})
        saved = [states[c.state_key] for c in _finetuning(trainer) if c.state_key in states]
        if not saved:
            return
        # those in the optimizers, for a checkpoint that was saved after `fit`
        optimizers = [state.get("internal_optimizer_metadata", {}) for state in saved]
        groups = [group for of in optimizers for groups in of.values() for group in groups]
        optimized = [name for group in groups for name in group["params"]]
        weights = dict(pl_module.named_parameters())  # the callback has frozen them in `setup`
        names = [name for name in checkpoint.get(_TRAINED, optimized) if name in weights]
        frozen = [name for name in names if not weights[name].requires_grad]
        if frozen and trainer.strategy.restore_checkpoint_after_setup:
            raise UsageError(
                f"`BaseFinetuning` had thawed `{frozen[0]}` before the checkpoint, and with "
                f"`strategy={type(trainer.strategy).__name__}` the optimizer cannot get it back. "
                "Resume with `strategy='ddp'` or on one device."
            )
        for name in frozen:
            weights[name].requires_grad_(True)


def _finetuning(trainer: Trainer) -> list[BaseFinetuning]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
