"""Checks of a run's settings, from the arguments alone to those that need the run's other parts.

Each check raises a `UsageError` that names the setting, its value and a fix.
"""

from collections.abc import Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.run.fsdp2 import FSDP2Strategy, is_sharded
from lit_rlsched.settings import UsageError, check_finite, check_name, check_template_kwargs
from lit_rlsched.text import parse_bytes
from lit_rlsched.training.precision import check_precision

_ACCUMULATES = (
    "an optimizer step has as many micro-batches as its completions need. Leave it out; "
    "`micro_batch_tokens` sets the size of a micro-batch, and `prompts_per_round` divided by "
    "`steps_per_round` that of a step"
)
REFUSED_CALLBACKS: dict[str, str] = {
    "BatchSizeFinder": "the size of a batch, an optimizer step, decides what is learned, and not "
    "what fits into memory. `micro_batch_tokens` decides that; `lit-rlsched estimate` says "
    "whether it fits. (`Tuner.scale_batch_size` adds this callback)",
    "GradientAccumulationScheduler": _ACCUMULATES,
    "LearningRateFinder": "the loss of a policy gradient says nothing about a learning rate: it is "
    "near zero with each. Compare the reward of short runs with different `learning_rate`. "
    "(`Tuner.lr_find` adds this callback)",
    "ModelPruning": "it renames weights and masks them in each pass, which the engine that decodes "
    "does not see. Prune the exported model",
    "SpikeDetection": "it stops a run whose loss is far above its mean, and the loss of a policy "
    "gradient is near zero on average. A step that is not finite stops the run anyway; "
    "`EarlyStopping('grad_norm', stopping_threshold=...)` watches the gradient",
}
"""Callbacks of Lightning that would do nothing or do harm, with the reason and what to use."""

# Arguments of the data module.


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of `RolloutDataModule` that contradict each other."""
    if (limit := settings["reward_memory_limit"]) is not None:
        parse_bytes(limit, "reward_memory_limit")
    prompts, steps = settings["prompts_per_round"], settings["steps_per_round"]
    if prompts % steps:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
        raise UsageError(
            f"`steps_per_round={steps}` does not divide `prompts_per_round={prompts}`. Use one of "
            f"{divisors}, or change `prompts_per_round`."
        )
    if (engines := settings["num_engines"]) > prompts:
        raise UsageError(
            f"`num_engines={engines}` is more than `prompts_per_round={prompts}`, and the "
            "completions of a prompt are decoded by one engine: some would have none. Use "
            f"{prompts} or less, or more prompts."
        )
    if (tokenizer := settings["tokenizer"]) is not None:
        check_name(
            "RolloutDataModule",
            "tokenizer",
            tokenizer,
            "The engine loads it by its name: save it with `save_pretrained(folder)`, and give the "
            "folder.",
        )
    engine = settings["engine"]
    if engine is not None and not isinstance(engine, RolloutEngine):
        raise UsageError(
            f"`RolloutDataModule({engine=})` is not an engine: give an object such as "
            "`VLLMEngine()` or `TransformersEngine()`."
        )
    check_template_kwargs(settings["chat_template_kwargs"] or {})
    check_finite({"chat_template_kwargs": settings["chat_template_kwargs"]})
    given = [name for name in ("val_data", "predict_data") if settings[name] is not None]
    if given and not (settings["val_greedy"] or settings["val_num_generations"]):
        raise UsageError(
            "`val_greedy=False` with `val_num_generations=0` leaves nothing to validate "
            f"`{given[0]}` with. Set `val_num_generations` to 1 or more, or leave `val_greedy` on."
        )


# The data module with the Trainer, the module and the engine.


def check_trainer(trainer: Trainer) -> None:
    """Refuse a strategy, a precision or a callback of the Trainer that cannot work."""
    check_strategy(trainer)
    check_precision(trainer.precision_plugin)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        kinds = ((cls.__name__, cls) for cls in type(callback).__mro__)
        names = [n for n, cls in kinds if getattr(lightning_callbacks, n, None) is cls]
        name = type(callback).__name__
        for why in filter(None, map(REFUSED_CALLBACKS.get, names)):
            raise UsageError(f"`{name}`: {why}.")
        if {"WeightAveraging", "StochasticWeightAveraging"} & {*names} and is_sharded(trainer):
            raise UsageError(
                f"`{name}`: it averages whole weights, and each process has a part of them. Use "
                "`strategy='ddp'`."
            )
        if "BaseFinetuning" in names and trainer.world_size > 1 and not is_sharded(trainer):
            raise UsageError(
                f"`{name}` with {trainer.world_size} processes: DDP does not share the gradients "
                "of weights that are thawed later. Use `strategy='fsdp2'` or one device."
            )
        module = trainer.lightning_module
        has = hasattr(type(module), "backbone") or hasattr(module, "backbone")
        if "BackboneFinetuning" in names and module and not has:
            raise UsageError(
                f"`{name}` freezes the module's `backbone`, and `{type(module).__name__}` has "
                "none. Add a property of this name to a subclass, or use `lora_rank`, which "
                "freezes the whole base."
            )


def check_given_to(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a compiled module, other data than a data module, and settings of the module."""
    name = type(module).__name__
    if getattr(module, "_compiler_ctx", None) is not None:
        raise UsageError(
            f"`torch.compile({name}(...))`: its training step takes micro-batches of another shape "
            "each time, and drives the optimizer itself, so it cannot be compiled. Give the "
            "Trainer the module itself."
        )
    for setting in ("gradient_clip_val", "gradient_clip_algorithm"):
        if (value := getattr(trainer, setting)) is not None:
            raise UsageError(
                f"`Trainer({setting}={getattr(value, 'value', value)!r})`: the module clips "
                "gradients itself, by their norm and once per optimizer step. Leave it out; the "
                "module's `gradient_clip_val` sets the largest norm."
            )
    check_accumulation(trainer)
    fn, loader, data = trainer.state.fn, "dataloaders", "val"
    loop: Any = trainer.validate_loop
    if fn == TrainerFn.FITTING:
        loop, loader, data = trainer.fit_loop, "train_dataloaders", "train"
    elif fn in (TrainerFn.TESTING, TrainerFn.PREDICTING):
        data = fn.value
        loop = trainer.test_loop if fn == TrainerFn.TESTING else trainer.predict_loop
    run = getattr(loop._data_source.instance, "run", None)  # a `TrainingRun`
    if not hasattr(run, "optimizer_steps"):
        method = "fit" if fn is None else fn.value
        raise UsageError(
            f"`Trainer.{method}`: `{name}` takes completions, which a data module draws. In "
            f"place of `{loader}=...` use "
            f"`trainer.{method}(module, datamodule=RolloutDataModule({data}_data=prompts, ...))`."
        )


def check_accumulation(trainer: Trainer) -> None:
    """Refuse a fixed number of micro-batches per optimizer step."""
    if (value := trainer.accumulate_grad_batches) != 1:
        raise UsageError(f"`Trainer(accumulate_grad_batches={value})`: {_ACCUMULATES}.")


def check_strategy(trainer: Trainer) -> None:
    """Refuse a Trainer whose processes could not share the update."""
    strategy, size = trainer.strategy, trainer.world_size
    name = type(strategy).__name__
    fix = "Use `strategy='ddp'`, or `strategy='fsdp2'` for a model that one device cannot hold."
    if size == 1 and (not is_sharded(trainer) or isinstance(strategy, FSDP2Strategy)):
        return
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        raise UsageError(
            f"`Trainer(strategy=...)`: `{name}` starts its {size} processes from this one, without "
            f"its engine and data. {fix}"
        )
    if not isinstance(strategy, DDPStrategy | FSDP2Strategy):
        several = f"{size} process{'es' * (size > 1)}"
        raise UsageError(
            f"`Trainer(strategy=...)`: `{name}` is not supported with {several}. {fix}"
        )
