"""TRL's trainers by their names: a GRPO or RLOO script moves here by changing its imports."""

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn

from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor
from transformers import trainer_pt_utils
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput

from lit_rlsched.callbacks import AsyncRollout, RNGState, RolloutLogger, RoundCheckpoint
from lit_rlsched.data.messages import NO_PROMPT
from lit_rlsched.data.rows import load_rows
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.module import GRPOModule, PolicyModule, RLOOModule
from lit_rlsched.run.saving.checkpoints import with_atomic_io
from lit_rlsched.run.saving.export import export
from lit_rlsched.run.saving.given_model import model_folder, tokenizer_folder
from lit_rlsched.run.saving.run_folder import newest_checkpoint
from lit_rlsched.run.trl_config import AsyncGRPOConfig, GRPOConfig, RLOOConfig, by_our_names
from lit_rlsched.run.trl_state import History, accelerator_of, with_their_names
from lit_rlsched.settings import UsageError, counterpart
from lit_rlsched.training.advantages import group_relative
from lit_rlsched.training.learner import RoundLogprobs
from lit_rlsched.training.lora import settings_of
from lit_rlsched.training.policy import load_tokenizer
from lit_rlsched.training.schedule import RunFacts

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "GRPOConfig", "GRPOTrainer"]
__all__ += ["RLOOConfig", "RLOOTrainer"]

_MORE = (
    *("micro_batch_tokens", "reward_timeout", "reward_workers", "reward_memory_limit"),
    *("reward_env_vars", "environment_workers", "tool_timeout", "max_sessions", "tool_steps"),
    *("engine", "num_engines"),
)
"""Arguments of `RolloutDataModule` that TRL has not."""


class _RolloutTrainer:
    """Makes a module, its data and a Lightning Trainer of what TRL's trainers are given."""

    _config: ClassVar[type[GRPOConfig | RLOOConfig | AsyncGRPOConfig]]
    _module: ClassVar[type[PolicyModule]]
    _data: ClassVar[Mapping[str, Any]] = {}
    _whole_rounds: ClassVar[bool] = True

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
        self._check_callbacks(callbacks or ())
        self.folder = Path(str(args.output_dir))
        self.hub_model_id = str(args.hub_model_id or self.folder.absolute().name)
        """Repository that `push_to_hub` uploads to."""
        self._world = args.world_size
        prompts, steps = args.sizes_of_round()
        if train_dataset is None:
            if args.max_steps <= 0 or environment_factory is None:
                why = " Give prompts, or an `environment_factory` and `max_steps`."
                self._refuse("train_dataset=None", why)
            train_dataset = [{"prompt": NO_PROMPT}] * prompts  # as TRL
        if processing_class is None and not isinstance(model, str | os.PathLike):
            processing_class = getattr(model, "name_or_path", None) or None
        seed_everything(args.seed, verbose=False)
        several = self._world > 1
        if not (processing_class is None or isinstance(processing_class, str | os.PathLike)):
            at = self.folder / "initial_tokenizer"
            processing_class = tokenizer_folder(processing_class, at, several=several)
        rounds = {"prompts_per_round": prompts, "steps_per_round": steps, **self._data}
        self.datamodule = RolloutDataModule(
            train_dataset,
            reward_funcs,
            val_data=eval_dataset,
            tokenizer=processing_class and str(processing_class),
            tools=tools,
            environment_factory=environment_factory,
            seed=args.seed,
            **{"engine": self._engine(), **by_our_names(args, "data"), **rounds, **more},
        )
        run = self.datamodule.run
        run.settings = replace(run.settings, whole_rounds=self._whole_rounds)
        lora = settings_of(peft_config)
        length = self._length(train_dataset, prompts, run.settings.steps_per_epoch)
        if not isinstance(model, str | os.PathLike):
            at = self.folder / "initial_model"
            model = model_folder(model, at, several=several, gets_adapter=bool(lora))
        self.module = self._module(str(model), **self.module_settings(length["max_steps"]), **lora)
        self._history = History()
        self.trainer = Trainer(**length, **self._trainer_settings(callbacks or []))
        self._history.trainer = self.trainer
        self.accelerator = accelerator_of(self.trainer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.folder.mkdir(parents=True, exist_ok=True)

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise UsageError(f"`{type(self).__name__}({what})` cannot be used here.{why}")

    def _check_callbacks(self, callbacks: Sequence[Any]) -> None:
        for wrong in (one for one in callbacks if not isinstance(one, Callback)):
            why = f" `{type(wrong).__name__}` is not Lightning's: use one that is."
            self._refuse("callbacks", why)

    def module_settings(self, steps: int) -> dict[str, Any]:
        """Settings that all modules have, in a run of this number of optimizer steps."""
        args = self.args
        share = args.warmup_steps < 1
        warmup = math.ceil(args.warmup_steps * steps) if share else int(args.warmup_steps)
        schedule: dict[str, Any] = {"warmup_steps": warmup}
        if args.lr_scheduler_type == "constant":
            schedule = {"warmup_steps": 0}
        elif args.lr_scheduler_type == "constant_with_warmup":
            schedule["lr_scheduler_type"] = "constant"
        return {
            **{**by_our_names(args, "model"), **schedule},
            "betas": (args.adam_beta1, args.adam_beta2),
            "importance_sampling_mode": None,  # TRL corrects in GRPO with vLLM alone
        }

    def _engine(self) -> RolloutEngine:
        if not self.args.use_vllm:
            return TransformersEngine()
        if self.args.vllm_mode != "colocate":
            self._refuse("vllm_mode='server'", counterpart("vllm_server_host", str))
        return VLLMEngine(**by_our_names(self.args, "VLLMEngine"))

    def _length(self, rows: Any, prompts: int, steps: int) -> dict[str, Any]:
        """Return when the run ends, and when it validates; `steps` is those of a round."""
        args, most, rounds = self.args, self.args.max_steps, 1
        if most <= 0 or args.eval_strategy == "epoch":
            count = len(load_rows(rows, self.datamodule.run.settings.has_objects))
            rounds = max(1, count // prompts)
            if most <= 0:
                total, by = (rounds, 1) if self._whole_rounds else (count, prompts)
                most = math.ceil(args.num_train_epochs * total * steps / by)
        each = _steps(args.eval_steps or args.logging_steps, most)
        waits = {"no": most, "epoch": rounds, "steps": max(1, int(each) // steps)}
        if args.eval_strategy not in waits:
            self._refuse("eval_strategy", " Use `no`, `epoch` or `steps`.")
        return {
            "max_steps": most,
            "check_val_every_n_epoch": waits[args.eval_strategy],
            "limit_val_batches": float(args.eval_strategy != "no" or args.eval_on_start),
            "num_sanity_val_steps": -1 if args.eval_on_start else 0,
            "log_every_n_steps": max(1, math.ceil(_steps(args.logging_steps, most))),
        }

    def _schedule(self) -> list[Callback]:
        """Return the callbacks that schedule the rollouts as TRL's trainer does."""
        return []

    def _trainer_settings(self, callbacks: Sequence[Callback]) -> dict[str, Any]:
        """Return the settings of the Trainer that do not depend on the length of the run."""
        args, local = self.args, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if args.fp16 and args.bf16:
            self._refuse("args", " Give `fp16` or `bf16`.")
        half = "16-mixed" if args.fp16 else "bf16-mixed"
        wanted: list[Callback] = [RNGState(), self._history, *self._schedule()]
        if args.log_completions:
            wanted.append(RolloutLogger())
        if args.save_strategy not in ("no", "steps", "epoch"):
            self._refuse("save_strategy", " Use `no`, or `steps`, which saves by time.")
        if args.save_strategy != "no":
            kept = {} if args.save_total_limit is None else {"keep": args.save_total_limit}
            wanted.append(RoundCheckpoint(str(self.folder / "checkpoints"), **kept))
        given = {type(callback) for callback in callbacks}
        loggers = list[Logger]()
        for name in [args.report_to] if isinstance(args.report_to, str) else args.report_to or []:
            if name == "wandb":
                loggers += [WandbLogger(args.run_name, project=args.project, save_dir=self.folder)]
            elif name == "tensorboard":
                loggers += [TensorBoardLogger(self.folder, name=args.run_name or "runs")]
            elif name != "none":
                self._refuse(f"report_to={name!r}", " Use `none`, `wandb` or `tensorboard`.")
        return {
            "accelerator": "cpu" if args.use_cpu else "auto",
            "devices": local,
            "num_nodes": self._world // local,
            "strategy": "ddp" if self._world > 1 else "auto",
            "precision": half if args.fp16 or args.bf16 in (None, True) else "32-true",
            "deterministic": args.full_determinism,
            "plugins": with_atomic_io(None),
            "callbacks": [*callbacks, *(one for one in wanted if type(one) not in given)],
            "logger": [*loggers, self._history],
            "enable_progress_bar": not args.disable_tqdm,
            "enable_model_summary": False,
            "enable_checkpointing": args.save_strategy != "no",
            "default_root_dir": self.folder,
        }

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train.

        Args:
            resume_from_checkpoint: A checkpoint to go on from; true is the newest in `output_dir`.

        Returns:
            `global_step`, `training_loss` (the mean over all optimizer steps) and `metrics`.

        Raises:
            UsageError: there is none.
        """
        path: Any = resume_from_checkpoint or None
        if path is True and (path := newest_checkpoint(self.folder)) is None:
            raise UsageError(f"There is no checkpoint in `{self.folder}` to go on from.")
        self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=path)
        return self._history.output(self.args.completions_per_step)

    def evaluate(self) -> dict[str, float]:
        """Answer the prompts of `eval_dataset`.

        Returns:
            Metrics by their names here, `val/reward`, and by TRL's, `eval_reward`.

        Raises:
            UsageError: there is no `eval_dataset`.
        """
        if self.eval_dataset is None:
            self._refuse("eval_dataset=None", " `evaluate` needs held-out prompts.")
        limit, self.trainer.limit_val_batches = self.trainer.limit_val_batches, 1.0
        try:
            (metrics,) = self.trainer.validate(self.module, datamodule=self.datamodule)
        finally:
            self.trainer.limit_val_batches = limit
        return with_their_names(metrics)

    log_metrics = trainer_pt_utils.log_metrics
    save_metrics = trainer_pt_utils.save_metrics
    save_state = trainer_pt_utils.save_state
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`{type(self).__name__}` of `lit_rlsched.trl` has no `{name}`. Its attributes "
            "`trainer`, `module` and `datamodule` are Lightning's (docs/tutorials/from_trl.md)."
        )

    @property
    def state(self) -> TrainerState:
        """State of a trainer of transformers: `global_step`, `log_history`, ..."""
        return self._history.state(logging_steps=self.args.logging_steps)

    @property
    def model(self) -> Any:
        """The model that is trained."""
        if self.module.model is None:
            self.module.trainer = self.trainer  # has the precision
            self.module.configure_model()
        return self.module.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        name = self.datamodule.run.settings.tokenizer or self.module.hparams["model"]
        return load_tokenizer(name)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.trainer.is_global_zero

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.accelerator.is_local_main_process

    def add_callback(self, callback: Callback) -> None:
        """Add a callback of Lightning before the training."""
        self._check_callbacks([callback])
        self.trainer.callbacks.insert(0, callback)  # type: ignore[attr-defined]

    def end(self) -> None:
        """Do nothing: loggers and processes end with the training."""

    def create_model_card(self, **_: Any) -> None:
        """Write the model card into `output_dir`, as `save_model` does."""
        if not (self.folder / "README.md").exists():
            self.save_model()

    def push_to_hub(
        self, *_: Any, token: str | None = None, revision: str | None = None, **__: Any
    ) -> None:
        """Upload the trained model to `hub_model_id`, from `output_dir/hub`, where it stays.

        Raises:
            RunFailed: the upload failed; says how to try it again.
            UsageError: a token or a revision is given.
        """
        if token or revision:
            self._refuse("token or revision", " Log in with `hf auth login`; `main` is written.")
        hub = self.folder / "hub"
        shutil.rmtree(hub, ignore_errors=True)
        self._export(lambda path: export(path, str(hub), push_to_hub=self.hub_model_id))

    def save_model(self, output_dir: str | None = None) -> None:
        """Write model and tokenizer as a Hugging Face folder, by default `output_dir` of the run.

        Adapters are merged into the model.
        """
        to = output_dir or self.folder
        self._export(
            lambda path: shutil.copytree(
                export(path, str(Path(path).with_name("model"))), to, dirs_exist_ok=True
            )
        )

    def _export(self, write: Callable[[str], Any]) -> None:
        """Give a checkpoint of the weights to `write`, on the first process."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "last.ckpt")
            self.trainer.save_checkpoint(path, weights_only=True)
            if self.trainer.is_global_zero:
                write(str(path))


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
            `reward_timeout`, `reward_env_vars`, `tool_timeout`, `engine`, ...

    Attributes:
        args, state, model, accelerator, processing_class: As in TRL.
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

    def module_settings(self, steps: int) -> dict[str, Any]:
        args = self.args
        settings = super().module_settings(steps)
        if args.loss_type == "bnpo" and args.gradient_accumulation_steps * self._world > 1:
            why = (
                " TRL takes the mean of the means of its micro-batches, to which it deals "
                "completions by chance. Use `dapo`, or one process and "
                "`gradient_accumulation_steps=1`."
            )
            self._refuse("loss_type='bnpo'", why)
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

    def module_settings(self, steps: int) -> dict[str, Any]:
        return {**super().module_settings(steps), **by_our_names(self.args, "RLOOModule")}


class AsyncGRPOModule(GRPOModule):
    """Divides advantages by the standard deviation without Bessel's correction, as TRL does."""

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        deviations = group_relative(rewards, "none")
        scored = rewards.isfinite().sum(dim=1, keepdim=True).clamp(min=1)
        variance = deviations.square().sum(dim=1, keepdim=True) / scored
        return deviations / (variance.sqrt() + 1e-8)


class AsyncGRPOTrainer(_RolloutTrainer):
    """TRL's `AsyncGRPOTrainer`: the engine draws in a process of its own during the updates.

    The schedule is `AsyncRollout`, with rounds of `weight_sync_steps` optimizer steps. For the
    arguments see `GRPOTrainer`. What is given to `vllm serve` in TRL is an `engine` here:
    `engine=ProcessEngine(VLLMEngine(tensor_parallel_size=2))`.
    """

    _config = AsyncGRPOConfig
    _module = AsyncGRPOModule
    _data: ClassVar = {"shuffle": False}
    _whole_rounds = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        others["processing_class"] = processing_class  # not the fifth argument in `GRPOTrainer`
        super().__init__(model, reward_funcs, args, train_dataset, **others)

    def _schedule(self) -> list[Callback]:
        run, tasks = self.datamodule.run, self.args.max_inflight_tasks
        prompts = None if tasks < 0 else tasks // run.settings.num_generations
        try:
            rollout = AsyncRollout(self.args.max_staleness, prompts)
            rollout.apply(run.schedule, RunFacts(run.settings))
        except UsageError as error:
            if prompts is None:
                raise
            why = counterpart("max_inflight_tasks", lambda ours: f"`{ours}`")
            self._refuse(f"max_inflight_tasks={tasks}", f"{why} {error}")
        return [rollout]

    def module_settings(self, steps: int) -> dict[str, Any]:
        settings = super().module_settings(steps)
        return {**settings, "loss_type": "bnpo", "old_logprobs": "engine"}

    def _engine(self) -> RolloutEngine:
        return ProcessEngine(VLLMEngine())


def _steps(given: float, most: int) -> float:
    """Return a number of steps, which TRL takes as a share of the run if it is below 1."""
    return given * most if given < 1 else given
