"""TRL's trainers by their names: a GRPO or RLOO script moves here by changing its imports."""

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn

from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks import RNGState, RolloutLogger, RoundCheckpoint
from lit_rlsched.data.messages import NO_PROMPT
from lit_rlsched.data.rows import is_stream, load_rows
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.module import GRPOModule, PolicyModule, RLOOModule
from lit_rlsched.run.saving.checkpoints import with_atomic_io
from lit_rlsched.run.saving.export import export
from lit_rlsched.run.saving.run_folder import newest_checkpoint
from lit_rlsched.settings import UsageError, counterpart, did_you_mean
from lit_rlsched.training.lora import settings_of

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"]

Settings = Mapping[str, Any]
"""TRL's settings, with TRL's defaults."""

_OF_MODULE: Settings = {
    **{"learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0},
    **{"weight_decay": 0.0, "max_grad_norm": 1.0, "gradient_checkpointing": True},
    **{"beta": 0.0, "epsilon": 0.2, "epsilon_high": None},
}
_OF_GRPO: Settings = {"loss_type": "dapo", "delta": None, "scale_rewards": "group"}
_OF_DATA: Settings = {
    **{"num_generations": 8, "num_iterations": 1, "max_completion_length": 512},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "reward_weights": None},
    **{"mask_truncated_completions": False, "chat_template_kwargs": None},
    **{"shuffle_dataset": True, "seed": 42},
}
_OF_VLLM: Settings = {
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False,
}
_RENAMED = {"max_grad_norm": "gradient_clip_val", "shuffle_dataset": "shuffle"}
"""Those that have another name here; names of vLLM's settings have no `vllm_`."""
_OTHERS: Settings = {
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "min_p": None,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "num_generations_eval": None,
    "bf16": None,
    "fp16": False,
    "use_cpu": False,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "full_determinism": False,
    "logging_steps": 10,
    "log_completions": False,
    "report_to": "none",
    "run_name": None,
    "project": "huggingface",
    "disable_tqdm": None,
    "save_strategy": "steps",
    "save_total_limit": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_on_start": False,
}
"""TRL's defaults of settings that are understood in their own way."""
_CORRECTION: Settings = {
    "importance_sampling_level": "token",
    "max_tool_calling_iterations": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
"""The same of settings that RLOO has not."""
_WITHOUT_EFFECT = {
    *("per_device_eval_batch_size", "eval_accumulation_steps", "save_steps", "log_level", "tf32"),
    *("remove_unused_columns", "gradient_checkpointing_kwargs", "use_liger_kernel"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "torch_compile", "torch_compile_backend"),
    *("torch_compile_mode", "torch_empty_cache_steps", "log_unique_prompts", "ddp_timeout"),
    *("pad_to_multiple_of", "num_completions_to_print", "vllm_max_model_length"),
    *("logging_strategy", "logging_first_step", "ddp_find_unused_parameters"),
}
"""Settings that do not change what is trained: a warning names them."""
_MUST_BE = {
    "use_bias_correction_kl": (True,),
    "disable_dropout": (True, False),
    "repetition_penalty": (1.0,),
    "optim": ("adamw_torch", "adamw_torch_fused"),
}
"""Settings that are as they are here: the values that a script may give."""
_OFF: tuple[Any, ...] = (None, False, 0.0, "", {}, [])
"""What any other setting of TRL may be."""


_MORE = (
    *("micro_batch_tokens", "reward_timeout", "reward_workers", "reward_memory_limit"),
    *("reward_env_vars", "environment_workers", "tool_timeout", "max_sessions", "tool_steps"),
)
"""Arguments of `RolloutDataModule` that TRL has not."""


class _Config:
    """Settings by TRL's names, as attributes."""

    _defaults: ClassVar[Settings]

    def __init__(self, output_dir: str | None = None, **settings: Any) -> None:
        vars(self).update(self._defaults)
        for name, value in {"output_dir": output_dir, **settings}.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`{type(self).__name__}` has no `{name}`")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WITHOUT_EFFECT and value not in _OFF:
            rank_zero_warn(f"`{name}` is without effect here; what is trained is the same.")
        why = counterpart(name, lambda ours: f"`{ours}`")
        allowed = _MUST_BE.get(name, _OFF if why else ())
        if name not in {*self._defaults, *_WITHOUT_EFFECT} and value not in allowed:
            raise UsageError(
                f"`{type(self).__name__}({name}={value!r})` cannot be used here."
                f"{why or did_you_mean(name, self._defaults)}"
            )
        vars(self)[name] = value


class GRPOConfig(_Config):
    """Settings of `GRPOTrainer` by TRL's names, with TRL's defaults.

    A setting that would change what is trained and has no counterpart is refused with the reason;
    one that changes nothing here is named in a warning. `docs/tutorials/from_trl.md` has all.

    Args:
        output_dir: Folder of the run; by default `trainer_output`.
        **settings: Settings of TRL 1.16's `GRPOConfig`.

    Raises:
        UsageError: a setting cannot be used here.
    """

    _defaults = {**_OTHERS, **_CORRECTION, **_OF_MODULE, **_OF_GRPO, **_OF_DATA, **_OF_VLLM}


class RLOOConfig(_Config):
    """Settings of `RLOOTrainer` by TRL's names, with TRL's defaults; see `GRPOConfig`."""

    _defaults = {
        **{**_OTHERS, **_OF_MODULE, **_OF_DATA, **_OF_VLLM},
        **{"normalize_advantages": False, "num_generations": 2, "beta": 0.05},
    }


class _RolloutTrainer:
    """Makes a module, its data and a Lightning Trainer of what TRL's trainers are given."""

    _config: ClassVar[type[_Config]]
    _module: ClassVar[type[PolicyModule]]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: list[Callback] | None = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        self.args = args = self._config() if args is None else args
        if not isinstance(args, self._config):
            self._refuse("args", f" Import `{self._config.__name__}` from `lit_rlsched.trl` too.")
        more = {name: others.pop(name) for name in _MORE if name in others}
        for name in (n for n, value in others.items() if value not in (None, (None, None))):
            self._refuse(name, counterpart(name, lambda ours: f"`{ours}`"))
        if isinstance(eval_dataset, Mapping):
            self._refuse("eval_dataset", " Give one split.")
        for callback in callbacks or ():
            if not isinstance(callback, Callback):
                self._refuse("callbacks", f" `{type(callback).__name__}` is not Lightning's.")
        self.folder = Path(args.output_dir or "trainer_output")
        self._world = int(os.environ.get("WORLD_SIZE", 1))
        prompts, steps = self._batches()
        if train_dataset is None:
            if args.max_steps <= 0 or environment_factory is None:
                why = " Give prompts, or an `environment_factory` and `max_steps`."
                self._refuse("train_dataset=None", why)
            train_dataset = [{"prompt": NO_PROMPT}] * prompts  # as TRL
        if processing_class is None and not isinstance(model, str | os.PathLike):
            processing_class = model.name_or_path or None
        seed_everything(args.seed, verbose=False)
        module = self._module(
            self._saved(model, "model"), **self.module_settings(), **settings_of(peft_config)
        )
        self.module = module
        self.datamodule = RolloutDataModule(
            train_dataset,
            reward_funcs,
            val_data=eval_dataset,
            tokenizer=processing_class and self._saved(processing_class, "tokenizer"),
            tools=tools,
            environment_factory=environment_factory,
            max_tool_calling_iterations=vars(args).get("max_tool_calling_iterations"),
            engine=self._engine(),
            prompts_per_round=prompts,
            steps_per_round=steps,
            min_p=args.min_p or 0.0,
            val_num_generations=args.num_generations_eval or 0,
            **_ours(args, _OF_DATA),
            **more,
        )
        has_objects = self.datamodule.run.settings.has_objects
        self.trainer = Trainer(
            **self._length(train_dataset, prompts, steps * args.num_iterations, has_objects),
            **self._hardware(),
            **self._outputs(callbacks or []),
        )

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise UsageError(f"`{type(self).__name__}({what})` cannot be used here.{why}")

    def _batches(self) -> tuple[int, int]:
        """Return prompts and optimizer steps of a round, by TRL's numbers of completions."""
        args = self.args
        at_once = args.per_device_train_batch_size * self._world
        completions, steps = args.generation_batch_size, args.steps_per_generation
        if None not in (completions, steps):
            self._refuse("args", " Give `generation_batch_size` or `steps_per_generation`.")
        if completions is None:
            steps = args.gradient_accumulation_steps if steps is None else steps
            completions = at_once * steps
        else:
            steps = completions / at_once
        updates, prompts = steps / args.gradient_accumulation_steps, completions // self._group
        whole = updates == int(updates) and completions % self._group == 0
        if not whole or prompts % updates or self._group < 2:
            raise UsageError(
                f"A rollout has {completions} completions, {self._group} for each prompt "
                f"(`num_generations`), and {updates:g} optimizer steps with "
                f"{at_once * args.gradient_accumulation_steps} completions each. Change "
                "`per_device_train_batch_size`, `gradient_accumulation_steps`, "
                "`generation_batch_size` or `steps_per_generation`, so that each step has whole "
                "prompts of at least two completions."
            )
        return prompts, int(updates)

    @property
    def _group(self) -> int:
        return int(self.args.num_generations)

    def _saved(self, given: Any, name: str) -> str:
        """Return the folder or name of a model or tokenizer; an object is saved."""
        if isinstance(given, str | os.PathLike):
            return str(given)
        if name == "model" and not hasattr(given, "peft_config"):
            frozen = [n for n, weight in given.named_parameters() if not weight.requires_grad]
            if frozen:
                why = f" `{frozen[0]}` is frozen; all weights are trained, or adapters."
                self._refuse("model", why)
        if self._world > 1:
            why = " Save it with `save_pretrained` before the run, and give the folder."
            self._refuse("model or processing_class", why)
        folder = self.folder / f"initial_{name}"
        given.save_pretrained(folder)
        return str(folder)

    def module_settings(self) -> dict[str, Any]:
        """Settings that both modules have."""
        args = self.args
        schedule: dict[str, Any] = {}
        if args.lr_scheduler_type == "constant":
            schedule = {"warmup_steps": 0}
        elif args.lr_scheduler_type == "constant_with_warmup":
            schedule = {"lr_scheduler_type": "constant"}
        return {
            **{**_ours(args, _OF_MODULE), **schedule},
            "betas": (args.adam_beta1, args.adam_beta2),
            "importance_sampling_mode": None,  # TRL corrects in GRPO with vLLM alone
        }

    def _engine(self) -> RolloutEngine:
        if not self.args.use_vllm:
            return TransformersEngine()
        if self.args.vllm_mode != "colocate":
            self._refuse("vllm_mode='server'", counterpart("vllm_server_host", str))
        return VLLMEngine(**_ours(self.args, _OF_VLLM))

    def _length(self, rows: Any, prompts: int, steps: int, has_objects: bool) -> dict[str, Any]:
        """Return when the run ends, and when it validates; `steps` is those of a round."""
        args, rounds = self.args, 1
        if args.max_steps <= 0 or args.eval_strategy == "epoch":
            if is_stream(rows):
                self._refuse("train_dataset", " It is a stream: give `max_steps` and `eval_steps`.")
            rounds = max(1, len(load_rows(rows, has_objects)) // prompts)
        most = args.max_steps
        if most <= 0:
            most = math.ceil(args.num_train_epochs * rounds * steps)
        logs = math.ceil(_steps(args.logging_steps, most))
        each = _steps(args.eval_steps or args.logging_steps, most)
        waits = {"no": most, "epoch": rounds, "steps": max(1, int(each) // steps)}
        if args.eval_strategy not in waits:
            self._refuse("eval_strategy", " Use `no`, `epoch` or `steps`.")
        return {
            "max_steps": most,
            "check_val_every_n_epoch": waits[args.eval_strategy],
            "limit_val_batches": float(args.eval_strategy != "no" or args.eval_on_start),
            "num_sanity_val_steps": -1 if args.eval_on_start else 0,
            "log_every_n_steps": max(1, logs),
        }

    def _hardware(self) -> dict[str, Any]:
        args, local = self.args, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if args.fp16 and args.bf16:
            self._refuse("args", " Give `fp16` or `bf16`.")
        half = "16-mixed" if args.fp16 else "bf16-mixed"
        return {
            "accelerator": "cpu" if args.use_cpu else "auto",
            "devices": local,
            "num_nodes": self._world // local,
            "strategy": "ddp" if self._world > 1 else "auto",
            "precision": half if args.fp16 or args.bf16 in (None, True) else "32-true",
            "deterministic": args.full_determinism,
            "plugins": with_atomic_io(None),
        }

    def _outputs(self, callbacks: Sequence[Callback]) -> dict[str, Any]:
        args = self.args
        wanted: list[Callback] = [RNGState()]
        if args.log_completions:
            wanted.append(RolloutLogger())
        if args.save_strategy not in ("no", "steps", "epoch"):
            self._refuse("save_strategy", " Use `no`, or `steps`, which saves by time.")
        if args.save_strategy != "no":
            kept = {} if args.save_total_limit is None else {"keep": args.save_total_limit}
            wanted.append(RoundCheckpoint(str(self.folder / "checkpoints"), **kept))
        given = {type(callback) for callback in callbacks}
        return {
            "callbacks": [*callbacks, *(one for one in wanted if type(one) not in given)],
            "logger": self._loggers(),
            "enable_progress_bar": not args.disable_tqdm,
            "enable_model_summary": False,
            "enable_checkpointing": args.save_strategy != "no",
            "default_root_dir": self.folder,
        }

    def _loggers(self) -> list[Logger]:
        args, made = self.args, list[Logger]()
        names = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
        for name in names:
            if name == "wandb":
                logger = WandbLogger(args.run_name, project=args.project, save_dir=self.folder)
                made.append(logger)
            elif name == "tensorboard":
                made.append(TensorBoardLogger(self.folder, name=args.run_name or "runs"))
            elif name != "none":
                self._refuse(f"report_to={name!r}", " Use `none`, `wandb` or `tensorboard`.")
        return made

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Train.

        Args:
            resume_from_checkpoint: A checkpoint to go on from; true is the newest in `output_dir`.

        Raises:
            UsageError: there is none.
        """
        path = resume_from_checkpoint or None
        if path is True:
            newest = newest_checkpoint(self.folder)
            if newest is None:
                raise UsageError(f"There is no checkpoint in `{self.folder}` to go on from.")
            path = str(newest)
        self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=path)

    def evaluate(self) -> Mapping[str, float]:
        """Answer the prompts of `eval_dataset`; return metrics whose names begin with `val/`."""
        limit, self.trainer.limit_val_batches = self.trainer.limit_val_batches, 1.0
        try:
            (metrics,) = self.trainer.validate(self.module, datamodule=self.datamodule)
        finally:
            self.trainer.limit_val_batches = limit
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Write model and tokenizer as a Hugging Face folder, by default `output_dir` of the run.

        Adapters are merged into the model.
        """
        with TemporaryDirectory() as folder:
            path = Path(folder, "last.ckpt")
            self.trainer.save_checkpoint(path, weights_only=True)
            if self.trainer.is_global_zero:
                exported = export(str(path), str(Path(folder, "model")))
                shutil.copytree(exported, output_dir or self.folder, dirs_exist_ok=True)


class GRPOTrainer(_RolloutTrainer):
    """TRL's `GRPOTrainer`, as far as scripts use it.

    Schedules are callbacks: `callbacks=[MicroGroupSampling(slots=16)]`.

    Args:
        model: Folder or hub name, or a model, which is saved in `output_dir`.
        reward_funcs: One reward function or several.
        args: Settings.
        train_dataset: Prompts. May be left out if an environment makes them and `max_steps` is set.
        eval_dataset: Held-out prompts.
        processing_class: A tokenizer, its folder or its hub name.
        callbacks: Lightning's callbacks.
        peft_config: peft's `LoraConfig`.
        tools: See `RolloutDataModule`.
        environment_factory: See `RolloutDataModule`.
        **others: Arguments of `RolloutDataModule` that TRL has not: `micro_batch_tokens`,
            `reward_timeout`, `reward_env_vars`, `tool_timeout`, ...

    Attributes:
        module: The LightningModule.
        datamodule: The data.
        trainer: Lightning's Trainer.

    Raises:
        UsageError: an argument cannot be used here.

    Example::

        trainer = GRPOTrainer("Qwen/Qwen3-0.6B", accuracy, GRPOConfig("runs/a"), rows)
        trainer.train()
    """

    _config = GRPOConfig
    _module = GRPOModule

    def module_settings(self) -> dict[str, Any]:
        args = self.args
        settings = {**super().module_settings(), **_ours(args, _OF_GRPO)}
        settings["importance_sampling_clip_max"] = args.vllm_importance_sampling_clip_max
        if args.use_vllm and args.vllm_importance_sampling_correction:
            settings["importance_sampling_mode"] = args.vllm_importance_sampling_mode
        if args.importance_sampling_level != "token":
            if (args.importance_sampling_level, args.loss_type) != ("sequence", "grpo"):
                why = " Use `token`, or `sequence` with `loss_type='grpo'`."
                self._refuse("importance_sampling_level", why)
            settings["loss_type"] = "gspo"
        return settings


class RLOOTrainer(_RolloutTrainer):
    """TRL's `RLOOTrainer`; see `GRPOTrainer`."""

    _config = RLOOConfig
    _module = RLOOModule

    def module_settings(self) -> dict[str, Any]:
        normalized = self.args.normalize_advantages
        return {**super().module_settings(), "normalize_advantages": normalized}


def _steps(given: float, most: int) -> float:
    """Return a number of steps, which TRL takes as a share of the run if it is below 1."""
    return given * most if given < 1 else given


def _ours(args: _Config, settings: Settings) -> dict[str, Any]:
    """Return settings by our names."""
    return {_RENAMED.get(n, n.removeprefix("vllm_")): getattr(args, n) for n in settings}
