"""FSDP2: each rank holds a part of every weight, gradient and optimizer state."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lit_rlsched.run.same_ranks import check_same_weights
from lit_rlsched.run.saving.checkpoints import read_checkpoint
from lit_rlsched.training.logprobs import SHARDED_FORWARD, whole_logprobs
from lit_rlsched.training.lora import base_model


class FSDP2Strategy(ModelParallelStrategy):
    """Shard the policy over all ranks with FSDP2: `Trainer(strategy="fsdp2")`."""

    strategy_name = "fsdp2"

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as PyTorch's optimizers number it, on rank 0.

        Lightning numbers all parameters of the model, also those that are not trained.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        assert self.lightning_module is not None
        state: Any = get_optimizer_state_dict(self.lightning_module, optimizer, options=options)
        names = [name for group in state.get("param_groups", ()) for name in group["params"]]
        return _renamed(state, {name: i for i, name in enumerate(names)}) if names else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Check a checkpoint as other strategies do; then each rank takes its part."""
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = read_checkpoint(path, verify=self.is_global_zero)
        module: Any = self.lightning_module
        check = getattr(module, "check_checkpoint", None)
        strict = module.strict_loading if check is None else False
        if check is not None:
            check(checkpoint)  # adapters without their base are complete
        weights, states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        options = StateDictOptions(strict=strict, full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, weights if self.is_global_zero else {}, options=options)
        by_id = {id(p): name for name, p in module.named_parameters()}
        for optimizer, state in zip(self.optimizers, states, strict=False):
            if check is not None:
                state = module.adopt_optimizer(optimizer, state, checkpoint)
            kept = [(group["fused"], group["foreach"]) for group in optimizer.param_groups]
            params = [p for group in optimizer.param_groups for p in group["params"]]
            named = _renamed(state, {i: by_id[id(p)] for i, p in enumerate(params)})
            set_optimizer_state_dict(module, optimizer, named, options=options)
            for i, p in enumerate(params):
                if i not in state["state"]:  # PyTorch has made one that counts a step
                    optimizer.state.pop(p, None)
            for group, (fused, foreach) in zip(optimizer.param_groups, kept, strict=True):
                group |= {"fused": fused, "foreach": foreach}  # as this device steps best
        return checkpoint


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with other names of its parameters."""
    groups = [
        {**group, "params": [names[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {names[name]: of for name, of in state["state"].items()}
    return {"state": values, "param_groups": groups}


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


def gradient_sync(trainer: Trainer, sync: bool) -> AbstractContextManager[Any]:
    """Say for a block whether its backward passes average gradients over the ranks.

    Only DDP can skip it: with FSDP2 a rank has no room for whole gradients.
    """
    block = getattr(trainer.strategy, "block_backward_sync", None)
    if sync or block is None or trainer.world_size == 1 or is_sharded(trainer):
        return nullcontext()
    return block()
