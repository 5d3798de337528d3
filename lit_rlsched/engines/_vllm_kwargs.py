"""Which arguments of `vllm.EngineArgs` a run may set beside `VLLMEngine`'s own."""

from collections.abc import Mapping
from typing import Any

PASSED_ON = (
    # memory
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "cpu_offload_gb",
    "cpu_offload_params",
    "disable_hybrid_kv_cache_manager",
    "watermark",
    "limit_mm_per_prompt",
    "language_model_only",
    "skip_mm_profiling",
    # steps and the cache of prefixes
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_num_active_seqs",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    # kernels and graphs
    "attention_backend",
    "moe_backend",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "enable_flashinfer_autotune",
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "optimization_level",
    "performance_mode",
    # finding and reading the checkpoint
    "trust_remote_code",
    "revision",
    "code_revision",
    "download_dir",
    "max_parallel_loading_workers",
    # worker processes
    "distributed_timeout_seconds",
    "cpu_distributed_timeout_seconds",
    "numa_bind",
    "numa_bind_nodes",
    "numa_bind_cpus",
)
"""They change where and how fast tokens are drawn, not which, beyond rounding."""

OWN = (
    "dtype",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_sleep_mode",
    "tensor_parallel_size",
)
OF_THE_RUN = {
    "model": "the module's `model` is the one that is trained",
    "max_model_len": "it follows from prompts and `max_completion_length`",
    "seed": "every completion has a seed of its own, from the run's `seed`",
    "generation_config": "sampling is set by `temperature`, `top_p`, `top_k` and `min_p`",
    "override_generation_config": "sampling is set by `temperature`, `top_p`, `top_k` and `min_p`",
    "pipeline_parallel_size": "use `tensor_parallel_size`",
    "data_parallel_size": "an engine is one replica",
    "distributed_executor_backend": "it follows from `tensor_parallel_size`; "
    "`ProcessEngine(VLLMEngine())` puts the engine into a process of its own",
}
OTHER_DRAWS = {
    "speculative decoding": ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    "another precision than the policy's": (
        "quantization",
        "quantization_config",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "load_format",
    ),
    "another model than the policy": (
        "hf_overrides",
        "model_class_overrides",
        "disable_sliding_window",
        "enable_lora",
        "default_mm_loras",
    ),
    "filtered or forced tokens": (
        "logits_processors",
        "structured_outputs_config",
        "reasoning_parser",
        "reasoning_config",
        "watermark_config",
        "diffusion_config",
    ),
    "other log-probs or events than the run records": (
        "logprobs_mode",
        "max_logprobs",
        "stream_interval",
        "async_scheduling",
        "use_fp64_gumbel",
    ),
    "a prefill in pieces, or another order": (
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "scheduling_policy",
        "scheduler_cls",
        "worker_cls",
        "worker_extension_cls",
    ),
    "keys and values of old weights, which outlive a weight sync": (
        "kv_transfer_config",
        "kv_offloading_size",
        "kv_offloading_backend",
        "kv_sharing_fast_prefill",
    ),
}
UNKNOWN = "it is not known to leave what is drawn and recorded as it is"
_WHY = {name: f"it means {what}" for what, names in OTHER_DRAWS.items() for name in names}


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse every argument that is not known to leave draws and log-probs as they are.

    Raises:
        ValueError: `kwargs` has one that is not in `PASSED_ON`; the message says why.
    """
    for name, value in kwargs.items():
        if name in PASSED_ON:
            continue
        if name in OWN:
            why = f"it is an argument of `VLLMEngine` itself: `VLLMEngine({name}={value!r})`"
        else:
            why = OF_THE_RUN.get(name) or _WHY.get(name) or UNKNOWN
        raise ValueError(
            f"`VLLMEngine(engine_kwargs={{{name!r}: {value!r}}})` is refused: {why}. Passed on to "
            f"vLLM are {', '.join(PASSED_ON)}."
        )
