"""Policy and optimizer in checkpoints, checked before they are loaded."""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

from lightning import LightningModule
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
    ) -> None:
        """Group the weights as a checkpoint does, so that its state of the optimizer fits.

        Raises:
            UsageError: the state is of another optimizer, or of other weights.
        """
        if (text := restored_settings(self.hparams, state["param_groups"])) is not None:
            rank_zero_warn(text)
        about = checkpoint["policy"]["optimizer"]
        if about["class"] != type(optimizer).__name__:
            raise UsageError(
                f"The checkpoint has the state of the optimizer `{about['class']}`, and this run "
                f"has `{type(optimizer).__name__}`. Return the former from `configure_optimizers`, "
                "or start a new run from the exported weights."
            )
        names, groups = chain(*_names(optimizer, self)), optimizer.param_groups
        weights = dict(zip(names, chain(*(group["params"] for group in groups)), strict=True))
        if odd := sorted(weights.keys() ^ {*chain(*about["groups"])}):
            raise UsageError(
                f"The checkpoint was made while other weights were trained: {len(odd)} differ, the "
                f"first is `{odd[0]}`. Train the same ones, or start a new run from the exported "
                "weights."
            )
        optimizer.param_groups = [
            {**groups[0], "params": [weights[name] for name in names]} for names in about["groups"]
        ]

    def on_fit_start(self) -> None:
        """Prepare the optimizer for the checkpoint's state, which Lightning loads next."""
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


def _names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the names of the weights in an optimizer's groups."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        [names.get(id(p), "not of the module") for p in group["params"]]
        for group in optimizer.param_groups
    ]
