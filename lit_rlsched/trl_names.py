"""What TRL's settings are called here: for error messages and `docs/tutorials/from_trl.md`."""

import re
from collections.abc import Callable, Iterable

from lit_rlsched.settings import did_you_mean

TRL_NAMES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Batches": (
        (
            "per_device_train_batch_size, gradient_accumulation_steps",
            "",
            "a round has `data.prompts_per_round` prompts, and `data.micro_batch_tokens` is the "
            "maximum number of positions in a forward and backward pass. It changes memory and "
            "speed, but not the update",
        ),
        (
            "per_device_eval_batch_size, auto_find_batch_size, eval_accumulation_steps",
            "",
            "the engine decodes as many completions at once as it has slots",
        ),
        (
            "generation_batch_size",
            "data.prompts_per_round",
            "times `data.num_generations` it is TRL's number",
        ),
        (
            "steps_per_generation",
            "data.steps_per_round",
            "the optimizer steps that share a rollout. TRL counts micro-batches: divide by "
            "`gradient_accumulation_steps`",
        ),
        ("num_iterations", "data.num_iterations", ""),
        (
            "num_train_epochs",
            "trainer.max_epochs",
            "counts **rounds**. One pass over the data is as many rounds as there are rows, "
            "divided by `data.prompts_per_round`",
        ),
        ("max_steps", "trainer.max_steps", "optimizer steps as in TRL"),
    ),
    "Settings": (
        ("model", "model.model", "a folder or hub name, not an object"),
        (
            "reward_funcs",
            "data.reward_funcs",
            "functions only (one may stand alone), no reward models. [`EngineJudgeReward`]"
            "(../howto/rewards.md#a-judge-in-the-job-itself) runs a judge model",
        ),
        (
            "train_dataset",
            "data.train_data",
            "a file, folder, hub name, task or list of rows. The columns are the same: `prompt` "
            "and any others",
        ),
        ("eval_dataset", "data.val_data", ""),
        ("processing_class", "data.tokenizer", "a folder or hub name. Text only"),
        ("callbacks", "trainer.callbacks", "Lightning's"),
        (
            "peft_config",
            "model.lora_rank, model.lora_alpha, model.lora_target_modules",
            "LoRA only ([LoRA](../howto/lora.md))",
        ),
        ("learning_rate", "model.learning_rate", ""),
        ("adam_beta1, adam_beta2", "model.betas", ""),
        ("weight_decay", "model.weight_decay", ""),
        ("optim", "model.optim", "AdamW only, fused by default on a GPU alone"),
        ("warmup_steps", "model.warmup_steps", ""),
        (
            "lr_scheduler_type",
            "model.lr_scheduler_type",
            "`constant`, `linear` or `cosine`; the default is `constant`, TRL's is `linear`",
        ),
        ("max_grad_norm", "model.gradient_clip_val", ""),
        (
            "gradient_checkpointing",
            "model.gradient_checkpointing",
            "off by default; TRL has it on",
        ),
        (
            "bf16, fp16, bf16_full_eval, fp16_full_eval",
            "trainer.precision",
            "float32 by default; TRL trains in bfloat16. `bf16-mixed` is TRL's "
            "([precision](../explanation/precision.md))",
        ),
        (
            "loss_type",
            "model.loss_type",
            "`grpo`, `bnpo`, `dr_grpo`, `dapo` and `cispo` are TRL's, tested against its "
            "functions. `gspo` and `rloo` are types here. `luspo`, `sapo` and `vespo` are missing",
        ),
        ("importance_sampling_level", "model.loss_type", "`sequence` is `gspo`"),
        (
            "epsilon, epsilon_high, delta",
            "model.epsilon, model.epsilon_high, model.delta",
            "",
        ),
        ("beta", "model.beta", ""),
        ("scale_rewards", "model.scale_rewards", ""),
        ("normalize_advantages", "RLOOModule.normalize_advantages", ""),
        ("num_generations", "data.num_generations", ""),
        ("max_completion_length", "data.max_completion_length", ""),
        (
            "temperature, top_p, top_k, min_p",
            "data.temperature, data.top_p, data.top_k, data.min_p",
            "",
        ),
        ("reward_weights", "data.reward_weights", ""),
        ("mask_truncated_completions", "data.mask_truncated_completions", ""),
        (
            "chat_template_kwargs",
            "data.chat_template_kwargs",
            "a row's columns `tools` and `chat_template_kwargs` count too. A last message of the "
            "assistant is continued, as in `trl.apply_chat_template`; `GRPOTrainer` begins a "
            "second one ([chat messages](../howto/data.md#chat-messages))",
        ),
        ("shuffle_dataset", "data.shuffle", ""),
        ("seed, data_seed", "data.seed", "by default that of `seed_everything`"),
        ("full_determinism", "trainer.deterministic", "`true` or `warn`"),
        (
            "num_generations_eval",
            "data.val_num_generations",
            "validation is greedy by default; this adds samples, mean@k and pass@k",
        ),
        ("eval_steps, eval_strategy", "trainer.check_val_every_n_epoch", "counts rounds"),
        (
            "eval_on_start",
            "trainer.num_sanity_val_steps",
            "-1 validates all held-out prompts before training; the command line does so",
        ),
        (
            "use_vllm, vllm_mode",
            "data.engine, data.num_engines",
            "vLLM in the trainer's process is the default, and `TransformersEngine` is "
            "`use_vllm=False`; `num_engines: 8` decodes with eight GPUs of the node. There is no "
            "server mode",
        ),
        ("vllm_gpu_memory_utilization", "VLLMEngine.gpu_memory_utilization", ""),
        ("vllm_enable_sleep_mode", "VLLMEngine.enable_sleep_mode", "on by default"),
        ("vllm_tensor_parallel_size", "VLLMEngine.tensor_parallel_size", ""),
        (
            "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
            "model.importance_sampling_mode",
            "`null` switches it off",
        ),
        ("vllm_importance_sampling_clip_max", "model.importance_sampling_clip_max", ""),
        (
            "log_completions, num_completions_to_print",
            "RolloutLogger.num_completions",
            "a callback: table, pictures and summary",
        ),
        (
            "logging_steps, logging_strategy, logging_first_step",
            "trainer.log_every_n_steps",
            "every round is logged in any case",
        ),
        (
            "output_dir",
            "trainer.default_root_dir",
            "the command line makes `runs/<config>/version_N`",
        ),
        (
            "report_to, run_name, project, trackio_space_id, trackio_bucket_id, "
            "trackio_static_space_id",
            "trainer.logger",
            "Lightning's loggers, which take names and projects as arguments. None is Trackio's",
        ),
        ("disable_tqdm", "trainer.enable_progress_bar", "`false` switches it off"),
        (
            "save_steps, save_strategy",
            "RoundCheckpoint.max_share",
            "by time, on by default in the command line",
        ),
        ("save_total_limit", "RoundCheckpoint.keep", "2 by default; TRL keeps all"),
        (
            "load_best_model_at_end, metric_for_best_model, greater_is_better, save_only_model",
            "trainer.callbacks",
            "Lightning's `ModelCheckpoint` with `monitor`, `mode` and `save_weights_only`",
        ),
        (
            "resume_from_checkpoint",
            "ckpt_path",
            "of the command (`--ckpt_path last`) and of `Trainer.fit`. It also continues in the "
            "middle of a rollout ([resume](../howto/resume.md))",
        ),
        ("use_cpu", "trainer.accelerator", "`cpu`"),
        (
            "fsdp, fsdp_config, deepspeed, ddp_backend, ddp_broadcast_buffers, "
            "ddp_bucket_cap_mb, ddp_find_unused_parameters, ddp_static_graph, ddp_timeout, "
            "accelerator_config, parallelism_config",
            "trainer.strategy",
            "`ddp` or `fsdp2` ([several GPUs](../howto/several_gpus.md)). There is no DeepSpeed",
        ),
    ),
    "What is missing here": (
        (
            "args",
            "",
            "settings are arguments of `GRPOModule`, `RolloutDataModule` and `Trainer`, not one "
            "object",
        ),
        ("ds3_gather_for_generation", "", "there is no DeepSpeed; DDP and FSDP2 work"),
        (
            "max_tool_calling_iterations, tools, rollout_func, environment_factory, log_multimodal",
            "",
            "a prompt has one answer, which is text: there are no tools, environments and images",
        ),
        (
            "vllm_server_base_url, vllm_server_host, vllm_server_port, vllm_server_timeout, "
            "vllm_group_port, vllm_model_impl, vllm_structured_outputs_regex",
            "",
            "there is no vLLM server, no choice of vLLM's model code and no structured output; "
            "`data.engine` decodes on this node, or on a Ray cluster",
        ),
        (
            "vllm_max_model_length",
            "",
            "it is derived: the longest prompt plus `data.max_completion_length`",
        ),
        ("disable_dropout", "", "the policy never uses dropout"),
        ("use_bias_correction_kl", "", "the correction is always on"),
        (
            "entropy_coef, use_adaptive_entropy, entropy_coef_min, entropy_coef_max, "
            "entropy_coef_delta, entropy_target, top_entropy_quantile",
            "",
            "there is no entropy bonus and no entropy filter. `entropy` is logged",
        ),
        (
            "sapo_temperature_neg, sapo_temperature_pos, vespo_k_pos, vespo_lambda_pos, "
            "vespo_k_neg, vespo_lambda_neg",
            "",
            "`model.loss_type` has no SAPO and no VESPO",
        ),
        (
            "sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps",
            "",
            "the reference model does not follow the policy",
        ),
        (
            "multi_objective_aggregation",
            "",
            "the reward is the sum of all functions' scores with `data.reward_weights`",
        ),
        (
            "reward_clip_range",
            "",
            "rewards are not clipped: clip in the reward function",
        ),
        (
            "reward_processing_classes",
            "",
            "reward models are not run: `data.reward_funcs` takes functions",
        ),
        (
            "off_policy_mask_threshold, vllm_importance_sampling_clip_min, "
            "vllm_importance_sampling_cap",
            "",
            "there is no mask by KL and no lower bound of the importance ratio; "
            "`model.importance_sampling_clip_max` is the upper one",
        ),
        (
            "repetition_penalty, generation_kwargs, cache_implementation",
            "",
            "completions are drawn from the policy's distribution; only `data.temperature`, "
            "`data.top_p`, `data.top_k` and `data.min_p` change it",
        ),
        (
            "model_init_kwargs, trust_remote_code, quantization_config, router_aux_loss_coef, "
            "cast_lm_head_to_fp32, use_cache",
            "",
            "`model.model` is loaded with transformers' own settings: no quantization, no code "
            "from the Hub, no auxiliary loss of experts. `trainer.precision` sets the precision",
        ),
        (
            "use_transformers_continuous_batching, transformers_continuous_batching_config, "
            "use_transformers_paged",
            "",
            "`TransformersEngine` batches continuously by itself; transformers' own batching is "
            "not used",
        ),
        (
            "log_unique_prompts, log_completions_hub_repo",
            "",
            "`RolloutLogger` logs completions of all prompts, and nothing to the Hub",
        ),
        ("pad_to_multiple_of", "", "micro-batches are padded to their longest sequence"),
        (
            "optimizers, optim_args, optim_target_modules, adam_epsilon, lr_scheduler_kwargs",
            "",
            "for another optimizer or schedule override `configure_optimizers` of the module",
        ),
        (
            "gradient_checkpointing_kwargs",
            "",
            "`model.gradient_checkpointing` is on or off",
        ),
        (
            "tf32",
            "",
            "call `torch.set_float32_matmul_precision` before training",
        ),
        (
            "use_liger_kernel, liger_kernel_config, torch_compile, torch_compile_backend, "
            "torch_compile_mode, torch_empty_cache_steps, neftune_noise_alpha",
            "",
            "the policy runs as transformers builds it",
        ),
        (
            "do_train, do_eval, do_predict",
            "",
            "`fit`, `validate` and `predict` are methods of the Trainer and commands",
        ),
        ("eval_delay", "", "validation begins with the run"),
        (
            "dataloader_drop_last, dataloader_in_order, dataloader_multiprocessing_context, "
            "dataloader_num_workers, dataloader_persistent_workers, dataloader_pin_memory, "
            "dataloader_prefetch_factor",
            "",
            "prompts are read and tokenised once: no worker loads batches",
        ),
        (
            "remove_unused_columns",
            "",
            "reward functions get every column",
        ),
        (
            "average_tokens_across_devices, batch_eval_metrics, eval_do_concat_batches, "
            "eval_use_gather_object, include_for_metrics, include_num_input_tokens_seen, "
            "label_names, label_smoothing_factor, length_column_name, prediction_loss_only, "
            "train_sampling_strategy",
            "",
            "it is about batches of labelled data, and there are none",
        ),
        (
            "push_to_hub, hub_always_push, hub_model_id, hub_private_repo, hub_revision, "
            "hub_strategy, hub_token",
            "",
            "a run uploads nothing: `lit-rlsched export --push_to_hub NAME` does "
            "([export](../howto/export.md))",
        ),
        (
            "enable_jit_checkpoint, save_on_each_node, ignore_data_skip, "
            "restore_callback_states_from_checkpoint",
            "",
            "a run that is stopped saves by itself, and a resumed one always goes on where it was",
        ),
        (
            "debug, local_rank, log_level, log_level_replica, log_on_each_node, "
            "logging_nan_inf_filter, skip_memory_metrics",
            "",
            "it is a switch of transformers' Trainer that Lightning's does not have",
        ),
    ),
    "Names of earlier versions": (
        (
            "max_prompt_length",
            "",
            "prompts are never cut, and one that does not fit into the model's context is "
            "refused at the start",
        ),
        ("warmup_ratio", "model.warmup_steps", "a number of optimizer steps"),
        ("use_liger_loss", "", "the policy runs as transformers builds it"),
        ("vllm_guided_decoding_regex", "", "there is no structured output"),
    ),
}
"""TRL's names, ours (empty: no counterpart) and a remark, by the headings of the page."""

_ROWS = {
    name: (ours.split(", ") if ours else [], remark)
    for rows in TRL_NAMES.values()
    for names, ours, remark in rows
    for name in names.split(", ")
}


def counterpart(name: str, written: Callable[[str], str]) -> str:
    """Return a sentence about the setting that TRL calls `name`; empty if it has none.

    Args:
        name: Name that somebody gave.
        written: How to write a setting such as `data.train_data`.
    """
    if name not in _ROWS:
        return ""
    ours, remark = _ROWS[name]
    if len(both := [one for one in ours if one.endswith(f".{name}")]) == 1:
        ours = both
    remark = re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)", "", remark)  # links of the page
    remark = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", remark)
    if not ours:
        return f" TRL's `{name}` has no counterpart here: {remark}."
    said = f" TRL's `{name}` is {', '.join(map(written, ours))} here"
    return f"{said}: {remark}." if remark else f"{said}."


def suggestion(name: str, known: Iterable[str], written: Callable[[str], str]) -> str:
    """Return what TRL's `name` is here or which known name is near; empty if neither."""
    return counterpart(name, written) or did_you_mean(name, known)


def trl_as_markdown(title: str) -> str:
    """Return the table of one heading of the page."""
    rows = TRL_NAMES[title]
    code = [
        [", ".join(f"`{n}`" for n in cell.split(", ") if n) for cell in row[:2]] for row in rows
    ]
    table = [
        [theirs, ours or "no counterpart", row[2]]
        for (theirs, ours), row in zip(code, rows, strict=True)
    ]
    head = "| TRL | here | differs in |\n|---|---|---|"
    if not any(row[1] for row in rows):
        table = [[theirs, why] for theirs, _, why in table]
        head = "| TRL | because |\n|---|---|"
    return "\n".join(
        [head, *(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in table)]
    )
