"""The settings of TRL's trainers as dataclasses, with TRL's defaults; each is used or answered."""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, make_dataclass
from enum import Enum
from itertools import chain
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import TrainingArguments

from lit_rlsched.settings import UsageError, counterpart, did_you_mean, trl_names

_FREE = (
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "gradient_checkpointing"),
    *("bf16", "fp16", "use_cpu", "seed", "full_determinism", "logging_steps", "report_to"),
    *("run_name", "project", "disable_tqdm", "save_strategy", "save_total_limit"),
    *("eval_strategy", "eval_steps", "eval_on_start"),
    # left to the script, or arguments of a method
    *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "hub_model_id"),
)
"""Settings of transformers that may have any value."""
_WITHOUT_EFFECT = (
    *("per_device_eval_batch_size", "eval_accumulation_steps", "save_steps", "log_level", "tf32"),
    *("remove_unused_columns", "gradient_checkpointing_kwargs", "use_liger_kernel"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_drop_last", "dataloader_in_order"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps"),
    *("log_unique_prompts", "ddp_timeout", "ddp_find_unused_parameters", "pad_to_multiple_of"),
    *("num_completions_to_print", "vllm_max_model_length", "logging_strategy"),
    *("logging_first_step", "average_tokens_across_devices", "skip_memory_metrics", "use_cache"),
    *("logging_nan_inf_filter", "log_on_each_node", "log_level_replica", "log_multimodal"),
    *("ds3_gather_for_generation", "eval_do_concat_batches", "include_num_input_tokens_seen"),
    *("vllm_server_timeout", "request_timeout", "weight_sync_timeout", "queue_maxsize"),
    "heartbeat_stale_after_s",
)
"""Settings that do not change what is trained: a warning names them."""
_OFF: tuple[Any, ...] = (None, False, 0.0, "", {}, [])
"""Values that switch a setting off."""
_ALSO: Mapping[str, tuple[Any, ...]] = {
    **{"optim": ("adamw_torch",), "disable_dropout": (True,)},
    "include_num_input_tokens_seen": (False,),
}
"""What a script may give of settings that are as they are here, besides TRL's default."""
_ENTRIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "accelerator_config": {"even_batches": ("True",), "use_seedable_sampler": ("True",)},
    "model_init_kwargs": {
        **{"revision": ("main",), "dtype": ("float32", "torch.float32"), "device_map": ("auto",)},
        "attn_implementation": ("sdpa", "eager"),
    },
}
"""The same of the entries of a dict, as text."""
_OF_PROCESS = {
    "world_size": ("WORLD_SIZE", "1"),
    "process_index": ("RANK", "0"),
    "local_process_index": ("LOCAL_RANK", "0"),
}
"""Properties of the process, and torchrun's variables with their defaults."""
_IN_OTHER_FORMS = ("optim", "importance_sampling_level", "use_vllm", "vllm_mode")
"""Settings whose values are others here."""
_ZERO = ("min_p", "num_generations_eval")
"""Settings that TRL switches off by `None`."""


@dataclass(init=False)
class _Settings:
    """Settings of all of TRL's trainers that are used here."""

    learning_rate: float = 1e-6
    gradient_checkpointing: bool = True
    bf16: bool | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    num_generations: int | None = 8
    max_completion_length: int | None = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    logging_steps: float = 10
    log_completions: bool = False

    def __init__(self, output_dir: str | None = None, **settings: Any) -> None:
        for one in _fields(type(self)).values():
            vars(self)[one.name] = _default(one)
        for name, value in {"output_dir": output_dir, **settings}.items():
            setattr(self, name, value)

    def __post_init__(self) -> None:
        """Do nothing; a script's own class may call it."""

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PROCESS:
            return int(os.environ.get(*_OF_PROCESS[name]))
        raise AttributeError(f"`{type(self).__name__}` of `lit_rlsched.trl` has no `{name}`")

    def __setattr__(self, name: str, value: Any) -> None:
        value = value.value if isinstance(value, Enum) else value
        if name == "output_dir" and value is None:
            value = "trainer_output"
        if name in _fields(type(self)) and isinstance(value, str) and value.startswith("{"):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise UsageError(f"`{type(self).__name__}({name}={value!r})`: {error}.") from error
        if not self._is_accepted(name, value):
            if name not in _WITHOUT_EFFECT or name not in _fields(type(self)):
                said = f"{name}={value!r}"
                if name in _ENTRIES:
                    entry, given = next(iter(_odd_entries(name, value).items()))
                    said = f"{name}={{{entry!r}: {given!r}}}"
                why = counterpart(name, lambda ours: f"`{ours}`")
                raise UsageError(
                    f"`{type(self).__name__}({said})` cannot be used here."
                    f"{why or did_you_mean(name, _fields(type(self)))}"
                )
            rank_zero_warn(f"`{name}` is without effect here; what is trained is the same.")
        vars(self)[name] = value

    def _is_accepted(self, name: str, value: Any) -> bool:
        cls = type(self)
        if (field := _fields(cls).get(name)) is None:
            earlier = trl_names()["Names of earlier versions"]
            return value in _OFF and any(name in row[0].split(", ") for row in earlier)
        bases = (base for base in cls.__mro__ if issubclass(base, _Unused))
        unused = (n for base in bases if not issubclass(base, _Settings) for n in _fields(base))
        if name in _FREE or name not in unused:
            return True
        default = _default(field)
        if value == default or (value in _OFF and default in _OFF) or value in _ALSO.get(name, ()):
            return True
        return name in _ENTRIES and not _odd_entries(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by their names."""
        return {name: getattr(self, name) for name in _fields(type(self))}

    @property
    def completions_per_step(self) -> int:
        """Completions of an optimizer step, on all processes."""
        each = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return int(each * self.world_size)

    def _whole_prompts(self, completions: int, others: str) -> tuple[int, int]:
        """Return prompts and optimizer steps of a round, each of which has whole prompts."""
        group = int(self.num_generations or 0)
        updates, prompts = completions / max(1, self.completions_per_step), completions // group
        whole = updates == int(updates) and completions % group == 0
        if updates < 1 or not whole or prompts % updates or group < 2:
            raise UsageError(
                f"A rollout has {completions} completions, {group} for each prompt "
                f"(`num_generations`), and {updates:g} optimizer steps with "
                f"{self.completions_per_step} completions each. Change "
                f"`per_device_train_batch_size`, `gradient_accumulation_steps`, {others}, so that "
                "each step has whole prompts of at least two completions."
            )
        return prompts, int(updates)


_OfTransformers: Any = make_dataclass(
    "_OfTransformers", [(one.name, one.type, one) for one in fields(TrainingArguments)], init=False
)


@dataclass(init=False)
class _SettingsInTurn(_Settings):
    """Those of the trainers that draw and train in turn."""

    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    beta: float = 0.0
    num_generations_eval: int | None = None
    num_iterations: int = 1
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False
    shuffle_dataset: bool | None = True
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool = False

    def sizes_of_round(self) -> tuple[int, int]:
        """Return prompts and optimizer steps of a round, by TRL's numbers of completions."""
        at_once = self.per_device_train_batch_size * self.world_size
        completions, steps = self.generation_batch_size, self.steps_per_generation
        others = "`generation_batch_size` or `steps_per_generation`"
        if None not in (completions, steps):
            raise UsageError(f"`{type(self).__name__}(...)`: give {others}.")
        if completions is None:
            steps = self.gradient_accumulation_steps if steps is None else steps
            completions = at_once * steps
        return self._whole_prompts(completions, others)


@dataclass(init=False)
class _Unused(_OfTransformers):  # type: ignore[misc]
    """Settings that must have TRL's default, or be off if that is off."""

    num_completions_to_print: int | None = None
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    repetition_penalty: float = 1.0
    vllm_server_base_url: str | None = None
    vllm_server_timeout: float = 240.0


@dataclass(init=False)
class _UnusedInTurn(_Unused):
    remove_unused_columns: bool | None = False
    log_unique_prompts: bool = False
    pad_to_multiple_of: int | str | None = "auto"
    vllm_max_model_length: int | None = None
    log_multimodal: bool = True
    ds3_gather_for_generation: bool = True
    disable_dropout: bool = False
    generation_kwargs: dict[str, Any] | str | None = None
    cache_implementation: str | None = None
    vllm_model_impl: str = "vllm"
    vllm_structured_outputs_regex: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_group_port: int = 51216
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False


@dataclass(init=False)
class _UnusedByGRPO(_UnusedInTurn):
    cast_lm_head_to_fp32: bool = False
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    multi_objective_aggregation: str = "sum_then_normalize"
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions_hub_repo: str | None = None
    vllm_importance_sampling_cap: float | None = None


@dataclass(init=False)
class _UnusedByRLOO(_UnusedInTurn):
    reward_clip_range: tuple[float, float] | None = None


@dataclass(init=False)
class _UnusedByAsyncGRPO(_Unused):
    dtype: str = "float32"
    ignore_data_skip: bool = True
    fork_threshold_tokens: int = 1024
    vllm_server_base_url: str = "http://localhost:8000"
    request_timeout: int = 600
    weight_sync_timeout: int = 1800
    queue_maxsize: int = 1024
    heartbeat_stale_after_s: float = 300.0


@dataclass(init=False)
class GRPOConfig(_SettingsInTurn, _UnusedByGRPO):
    """Settings of `GRPOTrainer` by TRL's names, with TRL's defaults.

    A setting that would change what is trained and has no counterpart is refused with the reason;
    one that changes nothing here is named in a warning. `docs/tutorials/from_trl.md` has all.

    Args:
        output_dir: Folder of the run; by default `trainer_output`.
        **settings: Settings of TRL 1.16's `GRPOConfig`.

    Raises:
        UsageError: a setting cannot be used here.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    delta: float | None = None
    scale_rewards: str = "group"
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0


@dataclass(init=False)
class RLOOConfig(_SettingsInTurn, _UnusedByRLOO):
    """Settings of `RLOOTrainer` by TRL's names, with TRL's defaults; see `GRPOConfig`."""

    num_generations: int | None = 2
    beta: float = 0.05
    normalize_advantages: bool = False


@dataclass(init=False)
class AsyncGRPOConfig(_Settings, _UnusedByAsyncGRPO):
    """Settings of `AsyncGRPOTrainer` by TRL's names, with TRL's defaults; see `GRPOConfig`."""

    max_completion_length: int | None = 2048
    logging_steps: float = 1
    lr_scheduler_type: str = "constant"
    max_tool_calling_iterations: int | None = None
    token_budget: int | None = None
    max_inflight_tasks: int = -1
    max_staleness: int = 4
    weight_sync_steps: int = 1

    def sizes_of_round(self) -> tuple[int, int]:
        """Return prompts and optimizer steps of a round, after which the engine gets weights."""
        completions = self.weight_sync_steps * self.completions_per_step
        return self._whole_prompts(completions, "`num_generations` or `weight_sync_steps`")


def _fields(cls: type) -> dict[str, Field[Any]]:
    return {one.name: one for one in fields(cls)}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _odd_entries(name: str, value: Any) -> dict[str, Any]:
    given = value.to_dict() if hasattr(value, "to_dict") else value
    if not isinstance(given, Mapping):
        return {name: value}
    usual = _ENTRIES[name]
    return {n: v for n, v in given.items() if v not in _OFF and str(v) not in usual.get(n, ())}


def by_our_names(args: Any, owner: str) -> dict[str, Any]:
    """Return settings of `model`, `data` or a class by our names, where each of TRL's is one."""
    found = {}
    for row in chain(*trl_names().values()):
        theirs, ours = (names.split(", ") for names in row[:2])
        for name, one in zip(theirs, ours, strict=True) if len(theirs) == len(ours) else ():
            if one.startswith(f"{owner}.") and name in vars(args) and name not in _IN_OTHER_FORMS:
                value = getattr(args, name)
                if name != "token_budget" or (value or 0) > 0:  # else it is no limit
                    found[one.removeprefix(f"{owner}.")] = value or 0 if name in _ZERO else value
    return found
