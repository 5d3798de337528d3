"""What vLLM is built with, and the memory that follows from it."""

from typing import TYPE_CHECKING, Any

from lit_rlsched.engines.base import EngineSpec, kv_bytes_per_token
from lit_rlsched.engines.footprint import Footprint, Sizes

if TYPE_CHECKING:
    from lit_rlsched.engines.vllm import VLLMEngine

CPU_BLOCK = 32
"""Tokens in a block of key-value cache. vLLM's 128 on CPU would never share a short prompt."""
BATCHED_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Tokens of one step: what vLLM's own `LLM` takes by default, but on the largest GPUs (16,384). An
engine that is built from a configuration gets 2,048 on a GPU."""
MAX_CPU_CACHE = 4 << 30


def engine_args(engine: "VLLMEngine", spec: EngineSpec) -> dict[str, Any]:
    """Of `vllm.EngineArgs`: the run's, the engine's settings, then its `engine_kwargs`.

    Raises:
        ValueError: `engine_kwargs` allow fewer requests than there are slots.
    """
    on_cpu = spec.device.type == "cpu"
    own = None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * 2**30)
    budget = spec.kv_cache_bytes
    if budget is not None:
        budget = int(budget * share_of_cache(engine, spec))
    cache = min((b for b in (own, budget) if b is not None), default=None)
    eager = on_cpu if engine.enforce_eager is None else engine.enforce_eager
    args: dict[str, Any] = {
        "model": spec.model,
        "dtype": engine.dtype or spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.slots,
        "max_num_batched_tokens": batched_tokens(engine, spec),
        "seed": spec.seed,
        "enforce_eager": eager,
        "kv_cache_memory_bytes": cache,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is the request's, not the checkpoint's
        # else a step returns the one before: a freed slot idles for one more, and an abort
        # leaves a draw behind that a generator kept for the request has already made
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if engine.tensor_parallel_size > 1:
        args["tensor_parallel_size"] = engine.tensor_parallel_size
        args["distributed_executor_backend"] = "mp"
    if on_cpu:
        args["block_size"] = CPU_BLOCK
        # vLLM takes back the draw of a half-prefilled request by its generator's offset, which
        # a CPU generator has not: a seeded request must be prefilled in one piece
        args["enable_chunked_prefill"] = False
        if own is None:
            args["kv_cache_memory_bytes"] = min(full_cache(engine, spec), cache or MAX_CPU_CACHE)
    else:
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization
        args["enable_sleep_mode"] = engine.enable_sleep_mode
    args |= engine.engine_kwargs
    for name in ("max_num_seqs", "max_num_active_seqs"):
        if (most := args.get(name)) is not None and most < spec.slots:
            raise ValueError(
                f"`VLLMEngine(engine_kwargs={{'{name}': {most}}})` is less than the "
                f"{spec.slots} slots of the run: leave it out, or ask for {most} slots."
            )
    return args


def batched_tokens(engine: "VLLMEngine", spec: EngineSpec) -> int:
    """Tokens of one step: each running request takes one of them."""
    most = max(spec.slots, engine.engine_kwargs.get("max_num_seqs") or 0)
    if spec.device.type == "cpu":
        return max(BATCHED_TOKENS["cpu"], most, spec.max_model_len)
    return max(most, min(BATCHED_TOKENS["cuda"], most * spec.max_model_len))


def full_cache(engine: "VLLMEngine", spec: EngineSpec) -> int:
    """Bytes that keep every slot full: vLLM would take half of the machine, and fill it."""
    config = text_config(spec)
    token = kv_bytes_per_token(config, engine.cache_dtype(spec)) * share_of_cache(engine, spec)
    blocks = 1 + spec.slots * (1 + spec.max_model_len // CPU_BLOCK)
    return int(blocks * CPU_BLOCK * token)


def share_of_cache(engine: "VLLMEngine", spec: EngineSpec) -> float:
    """Share of a token's keys and values that a worker holds: heads are not split."""
    if engine.tensor_parallel_size == 1:
        return 1.0
    heads = text_config(spec).num_key_value_heads
    return max(1, heads // engine.tensor_parallel_size) / heads


def footprint(engine: "VLLMEngine", spec: EngineSpec, sizes: Sizes) -> Footprint:
    """What vLLM will hold with these arguments."""
    args, dtype, full = engine_args(engine, spec), engine.cache_dtype(spec), sizes.full_slots(spec)
    weights, cache = sizes.parameters * dtype.itemsize, args["kv_cache_memory_bytes"]
    how = "`memory_budget`, or limit"
    if cache and cache >= full:
        how = f"{sizes.say_slots(spec)}, in whole blocks"
    if cache is None:
        share = args["gpu_memory_utilization"]
        cache = max(0, int(share * sizes.memory) - weights)
        how = f"the rest of gpu_memory_utilization={share}, vLLM's own steps included"
    sleeps = spec.device.type == "cuda" and engine.enable_sleep_mode
    asleep = "; vLLM sleeps in the update" if sleeps else ""
    return Footprint(weights, cache, not sleeps, sizes.say_weights(dtype) + asleep, how + asleep)


def cache_tokens(
    engine: "VLLMEngine", spec: EngineSpec, footprint: Footprint, token_bytes: int
) -> int:
    """Tokens that vLLM's cache will hold, in whole blocks, one of which is never used.

    Raises:
        ValueError: they are less than a completion may take.
    """
    tokens = int(footprint.cache / share_of_cache(engine, spec)) // token_bytes
    capacity = max(0, tokens // engine.kv_block - 1) * engine.kv_block
    if capacity < spec.max_model_len:
        raise ValueError(
            f"vLLM's key-value cache would hold {capacity:,} tokens, and one completion with its "
            f"prompt may take {spec.max_model_len:,}. Raise `VLLMEngine(kv_cache_gib=...)` or "
            "`gpu_memory_utilization`, or lower `max_completion_length`."
        )
    return capacity


def text_config(spec: EngineSpec) -> Any:
    """Of the checkpoint's language model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(spec.model).get_text_config()
