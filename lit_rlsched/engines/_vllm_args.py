"""The arguments vLLM is started with, and the memory that follows from them."""

from collections.abc import Mapping
from typing import Any

import torch

from lit_rlsched.engines.base import SlotEngine
from lit_rlsched.engines.devices import num_devices
from lit_rlsched.engines.spec import AdapterSpec, EngineSpec, Footprint, Sizes
from lit_rlsched.scheduling.admission import DEFAULT_SLOTS
from lit_rlsched.settings import UsageError
from lit_rlsched.text import kv_bytes_per_token, kv_heads

CPU_BLOCK = 32
"""Tokens in a block of key-value cache on CPU. vLLM's 128 would never share a short prompt."""
BATCHED_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Tokens of one step, as in vLLM's own `LLM` (which takes 16,384 on the largest GPUs). An engine
that is built from a configuration, as ours is, would get 2,048 on a GPU."""
MAX_CPU_CACHE = 4 << 30
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""

PASSED_ON = (
    # memory
    *("block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_gb"),
    *("cpu_offload_params", "disable_hybrid_kv_cache_manager", "watermark"),
    *("limit_mm_per_prompt", "language_model_only", "skip_mm_profiling"),
    # steps and the prefix cache
    *("max_num_batched_tokens", "enable_prefix_caching", "prefix_caching_hash_algo"),
    # kernels and graphs
    *("attention_backend", "moe_backend", "disable_cascade_attn", "disable_custom_all_reduce"),
    *("enable_flashinfer_autotune", "compilation_config", "cudagraph_capture_sizes"),
    *("max_cudagraph_capture_size", "optimization_level", "performance_mode"),
    # finding and reading the checkpoint
    *("trust_remote_code", "revision", "code_revision", "download_dir"),
    "max_parallel_loading_workers",
    # worker processes
    *("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
    *("numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
)
"""`engine_kwargs` that change where and how fast tokens are drawn, but, beyond rounding, not which
tokens. Every other argument is refused."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
"""Precisions that vLLM computes in."""
OWN = (
    *("dtype", "gpu_memory_utilization", "enforce_eager", "enable_sleep_mode"),
    *("enable_lora", "tensor_parallel_size"),
)
OF_THE_RUN = {
    "model": "it is the module's `model`",
    "max_model_len": "it follows from the prompts and `max_completion_length`",
    **dict.fromkeys(("max_num_seqs", "max_num_active_seqs"), "it is the run's number of slots"),
    "seed": "each completion has its own seed, derived from the run's `seed`",
    "generation_config": "sampling is set by `temperature`, `top_p`, `top_k` and `min_p`",
    "override_generation_config": "sampling is set by `temperature`, `top_p`, `top_k` and `min_p`",
    **dict.fromkeys(
        ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
        "it follows from the policy's adapters, with `VLLMEngine(enable_lora=True)`",
    ),
    "pipeline_parallel_size": "use `tensor_parallel_size`",
    "data_parallel_size": "an engine is one replica",
    "speculative_config": "on a CPU vLLM's rejection sampler draws wrongly at temperature 1, and "
    "elsewhere nothing of this package has been checked with it",
    "weight_transfer_config": "use `ProcessEngine(VLLMEngine(), weight_transfer=...)`",
    "distributed_executor_backend": "it follows from `tensor_parallel_size`; "
    "`ProcessEngine(VLLMEngine())` runs the engine in another process",
}
UNKNOWN = "with it vLLM may draw or record something else than the policy that is trained"


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse every argument that is not known to leave tokens and log-probs unchanged."""
    for name, value in kwargs.items():
        if name in PASSED_ON:
            continue
        if name in OWN:
            why = f"it is an argument of `VLLMEngine` itself: `VLLMEngine({name}={value!r})`"
        else:
            why = OF_THE_RUN.get(name, UNKNOWN)
        raise UsageError(
            f"`VLLMEngine(engine_kwargs={{{name!r}: {value!r}}})` is refused: {why}. Passed on to "
            f"vLLM are {', '.join(PASSED_ON)}."
        )


class VLLMSettings(SlotEngine):
    """The settings of `VLLMEngine`, and what follows from them before it starts."""

    dtype: str | None
    kv_cache_gib: float | None
    gpu_memory_utilization: float
    enforce_eager: bool | None
    enable_sleep_mode: bool
    engine_kwargs: dict[str, Any]
    kv_block: int = CPU_BLOCK

    def cache_dtype(self, spec: EngineSpec) -> torch.dtype:
        return DTYPES[self.dtype] if self.dtype else spec.dtype

    def most_slots(self, spec: EngineSpec) -> int:
        """The default `max_num_seqs` of vLLM (`EngineArgs.get_batch_defaults`)."""
        if spec.device.type != "cuda" or not torch.cuda.is_available():
            return DEFAULT_SLOTS
        gpu = torch.cuda.get_device_properties(spec.device)
        # vLLM counts no A100 among its large GPUs, although it may have the memory
        large = gpu.total_memory >= 70 << 30 and "a100" not in gpu.name.lower()
        return 1024 if large else DEFAULT_SLOTS

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """Limited by the GPUs, or on CPU the cores, and by the number of attention heads."""
        devices = num_devices(spec.device.type)
        heads = text_config(spec).num_attention_heads
        sizes = (2**i for i in range(devices.bit_length()))
        return max(size for size in sizes if heads % size == 0)

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """Memory that vLLM will hold with its arguments."""
        args, dtype, full = engine_args(self, spec), self.cache_dtype(spec), sizes.full_slots(spec)
        weights, cache = sizes.parameters * dtype.itemsize, args["kv_cache_memory_bytes"]
        how_weights = sizes.say_weights(dtype)
        if spec.adapters is not None:
            slot = args["max_lora_rank"]
            weights += spec.adapters.parameters * slot // spec.adapters.rank * dtype.itemsize
            how_weights += f", and a LoRA slot of rank {slot}"
        how = "limited by `memory_budget`, `kv_cache_gib` or their default"
        if cache and cache >= full:
            how = f"{sizes.say_slots(spec)}, in whole blocks"
        if cache is None:
            share = args["gpu_memory_utilization"]
            cache = max(0, int(share * sizes.memory) - weights)
            how = f"the rest of gpu_memory_utilization={share}, including vLLM's activations"
        sleeps = spec.device.type == "cuda" and self.enable_sleep_mode
        said = "; vLLM sleeps in the update" if sleeps else ""
        kept = weights if sleeps and self.enable_lora else 0
        return Footprint(weights, cache, not sleeps, how_weights + said, how + said, asleep=kept)

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int:
        """Tokens that vLLM's cache will hold: whole blocks, without the one it never uses."""
        tokens = int(footprint.cache / share_of_cache(self, spec)) // token_bytes
        capacity = max(0, tokens // self.kv_block - 1) * self.kv_block
        if capacity < spec.max_model_len:
            raise UsageError(
                f"vLLM's key-value cache would hold {capacity:,} tokens, and one completion with "
                f"its prompt may take {spec.max_model_len:,}. Raise "
                "`VLLMEngine(kv_cache_gib=...)` or `gpu_memory_utilization`, or lower "
                "`max_completion_length`."
            )
        return capacity


def engine_args(engine: VLLMSettings, spec: EngineSpec) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`: the run's, the engine's settings, then `engine_kwargs`."""
    if (dtype := engine.cache_dtype(spec)) not in DTYPES.values():
        raise UsageError(
            f"`precision: 64-true` with `VLLMEngine`: vLLM computes in {', '.join(DTYPES)}, not in "
            f"{str(dtype).removeprefix('torch.')}. Use `engine: TransformersEngine` or `precision: "
            "32-true`."
        )
    on_cpu = spec.device.type == "cpu"
    own = None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * 2**30)
    budget = spec.kv_cache_bytes
    if budget is not None:
        budget = int(budget * share_of_cache(engine, spec))
    cache = min((b for b in (own, budget) if b is not None), default=None)
    args: dict[str, Any] = {
        "model": spec.model,
        "dtype": dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.slots,
        "max_num_batched_tokens": batched_tokens(spec),
        "seed": spec.seed,
        "enforce_eager": on_cpu if engine.enforce_eager is None else engine.enforce_eager,
        "kv_cache_memory_bytes": cache,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling comes with each request, not with the checkpoint
        # otherwise a step returns the tokens of the step before: a freed slot idles one step more,
        # and an aborted request's generator has already made one draw too many
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if engine.tensor_parallel_size > 1:
        args["tensor_parallel_size"] = engine.tensor_parallel_size
        args["distributed_executor_backend"] = "mp"
    if engine.enable_lora:
        args |= lora_args(spec.adapters)
    if engine.weight_transfer is not None:
        args["weight_transfer_config"] = {"backend": engine.weight_transfer}
    if on_cpu:
        args["block_size"] = CPU_BLOCK
        # vLLM undoes the draw of a half-prefilled request by its generator's offset, which CPU
        # generators do not have: a seeded request must be prefilled in one piece
        args["enable_chunked_prefill"] = False
        if own is None:
            args["kv_cache_memory_bytes"] = min(full_cache(engine, spec), cache or MAX_CPU_CACHE)
    else:
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization
        args["enable_sleep_mode"] = engine.enable_sleep_mode
    args |= engine.engine_kwargs
    return args


def lora_args(adapters: AdapterSpec | None) -> dict[str, Any]:
    """Arguments for a slot that holds the policy's adapters."""
    if adapters is None:
        raise UsageError(
            "`VLLMEngine(enable_lora=True)`: there are no adapters for this engine. Leave it out."
        )
    rank = next((rank for rank in LORA_RANKS if rank >= adapters.rank), None)
    if rank is None:
        raise UsageError(
            f"`VLLMEngine(enable_lora=True)`: the adapters have a rank of {adapters.rank}, and "
            f"vLLM takes up to {LORA_RANKS[-1]}. Lower `lora_rank`, or leave `enable_lora` out: "
            "adapters are then merged."
        )
    # without `lora_target_modules` the embedding and the LM head would get LoRA layers as well
    return {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": [*adapters.modules]}


def batched_tokens(spec: EngineSpec) -> int:
    """Maximum number of tokens per step: at least one for each running request."""
    if spec.device.type == "cpu":
        return max(BATCHED_TOKENS["cpu"], spec.slots, spec.max_model_len)
    return max(spec.slots, min(BATCHED_TOKENS["cuda"], spec.slots * spec.max_model_len))


def full_cache(engine: VLLMSettings, spec: EngineSpec) -> int:
    """Bytes of cache when every slot is full. vLLM's default is half of the machine's memory."""
    config = text_config(spec)
    token = kv_bytes_per_token(config, engine.cache_dtype(spec)) * share_of_cache(engine, spec)
    blocks = 1 + spec.slots * (1 + spec.max_model_len // CPU_BLOCK)
    return int(blocks * CPU_BLOCK * token)


def share_of_cache(engine: VLLMSettings, spec: EngineSpec) -> float:
    """Share of a token's keys and values that each worker holds; a head is not split."""
    if engine.tensor_parallel_size == 1:
        return 1.0
    heads = kv_heads(text_config(spec))
    return max(1, heads // engine.tensor_parallel_size) / heads


def text_config(spec: EngineSpec) -> Any:
    """Configuration of the checkpoint's language model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(spec.model).get_text_config()
