"""FSDP2: each rank holds a part of every weight, gradient and optimizer state."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lit_rlsched.run.same_ranks import check_same_weights
from lit_rlsched.run.saving.checkpoints import (
    inspect_checkpoint,
    is_sharded_checkpoint,
    load_groups,
    load_parts,
    numbered,
    plain_errors,
    refusing,
    renamed,
    replace_folder,
    sync_folder,
    temporary_name,
)
from lit_rlsched.training.logprobs import SHARDED_FORWARD, whole_logprobs
from lit_rlsched.training.lora import base_model


class FSDP2Strategy(ModelParallelStrategy):
    """Shard the policy over all ranks with FSDP2: `Trainer(strategy="fsdp2")`."""

    strategy_name = "fsdp2"

    def __init__(self, save_distributed_checkpoint: bool = False, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as PyTorch's optimizers number it, on rank 0.

        Lightning numbers all parameters of the model, also those that are not trained.
        """
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        assert self.lightning_module is not None
        state = get_optimizer_state_dict(self.lightning_module, optimizer, options=options)
        return numbered(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a file as other strategies do; write a folder under another name, and rename it."""
        if not self._save_distributed_checkpoint:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        path = Path(self.broadcast(filepath))
        temporary: Path = self.broadcast(temporary_name(path) if self.is_global_zero else path)
        with plain_errors():
            super().save_checkpoint(checkpoint, temporary, storage_options)
        if self.is_global_zero:  # the parts of all ranks are written
            replace_folder(temporary, path)
            sync_folder(path.parent)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Check a checkpoint as other strategies do; then each rank takes its part."""
        path = Path(self.broadcast(checkpoint_path))
        sharded = is_sharded_checkpoint(path)
        checkpoint = inspect_checkpoint(path, verify=self.is_global_zero)
        module: Any = self.lightning_module
        check = getattr(module, "check_checkpoint", None)
        strict = module.strict_loading if check is None else False
        if check is not None:
            check(checkpoint)  # adapters without their base are complete
        weights, states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        options = StateDictOptions(strict=strict)
        if sharded:
            ours = get_model_state_dict(module)
            with refusing(path):
                weights = load_parts(path, "state_dict", {name: ours[name] for name in weights})
        else:
            options = replace(options, full_state_dict=True, broadcast_from_rank0=True)
            weights = weights if self.is_global_zero else {}
        set_model_state_dict(module, weights, options=options)
        for i, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=False)):
            if sharded:
                with refusing(path):
                    state = load_groups(path, f"optimizer_{i}")
            if check is not None:
                state = module.adopt_optimizer(optimizer, state, checkpoint)
            kept = [(group["fused"], group["foreach"]) for group in optimizer.param_groups]
            if sharded:
                own = get_optimizer_state_dict(module, optimizer)
                with refusing(path):
                    named = load_parts(path, f"optimizer_{i}", own)
            else:
                by_id = {id(p): name for name, p in module.named_parameters()}
                params = [p for group in optimizer.param_groups for p in group["params"]]
                named = renamed(state, {i: by_id[id(p)] for i, p in enumerate(params)})
            set_optimizer_state_dict(module, optimizer, named, options=options)
            for group, (fused, foreach) in zip(optimizer.param_groups, kept, strict=True):
                group |= {"fused": fused, "foreach": foreach}  # as this device steps best
        return checkpoint


if "fsdp2" not in StrategyRegistry:
    StrategyRegistry.register("fsdp2", FSDP2Strategy, description=FSDP2Strategy.__doc__ or "")


def is_sharded(trainer: Trainer | None) -> bool:
    """Whether the Trainer's strategy shards the policy."""
    return trainer is not None and isinstance(trainer.strategy, ModelParallelStrategy)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, which are gathered one at a time."""
    names = set(getattr(base_model(model), "_no_split_modules", None) or ())
    return [part for part in model.modules() if type(part).__name__ in names]


def shard(model: nn.Module, mesh: Any) -> None:
    """Shard a causal language model in place, layer by layer.

    `completion_logprobs` of this model then gathers the weights as a forward pass does.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    check_same_weights(model)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gathered = "gathered_logprobs"
    setattr(model, gathered, MethodType(whole_logprobs, model))
    register_fsdp_forward_method(model, gathered)

    def sharded(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        result = getattr(model, gathered)(*args, **kwargs)
        if not torch.is_grad_enabled():
            # embedding and LM head stay whole until a backward pass, so a step would not reach them
            model.reshard()  # type: ignore[operator]
        return result

    setattr(model, SHARDED_FORWARD, sharded)


@contextmanager
def gradient_sync(trainer: Trainer, sync: bool) -> Iterator[None]:
    """Whether the backward passes inside average gradients over the ranks.

    Only DDP can skip it: with FSDP2 a rank has no room for whole gradients.
    """
    block = getattr(trainer.strategy, "block_backward_sync", None)
    if sync or block is None or trainer.world_size == 1 or is_sharded(trainer):
        yield
    else:
        with block():
            yield
