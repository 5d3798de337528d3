"""vLLM's errors, with advice on what to do about them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from lit_rlsched.engines.base import EngineBroken, EngineSpec
from lit_rlsched.types import FinishReason

ENDS = get_args(FinishReason)


@contextmanager
def naming_dead_workers(llm_engine: Any, size: int) -> Iterator[None]:
    """Report a dead worker process as such, where vLLM only names the call that failed.

    Raises:
        EngineBroken: a worker process has died or does not answer.
    """
    try:
        yield
    except Exception as error:
        executor = llm_engine.engine_core.engine_core.model_executor
        hangs = isinstance(error, TimeoutError)
        if not (hangs or getattr(executor, "is_failed", False)):
            raise
        what = "does not answer" if hangs else "has died"
        raise EngineBroken(
            f"A worker process of `VLLMEngine(tensor_parallel_size={size})` {what}, and the "
            "requests are lost. If it was killed for its memory, lower `kv_cache_gib` or "
            "`gpu_memory_utilization`. `ProcessEngine` replaces such an engine; without it, "
            "resume from the last checkpoint."
        ) from error


@contextmanager
def naming_the_budget(spec: EngineSpec) -> Iterator[None]:
    """Name the run's budget if it makes vLLM's start fail: vLLM blames `gpu_memory_utilization`."""
    try:
        yield
    except ValueError as error:
        if spec.kv_cache_bytes is None:
            raise
        raise ValueError(
            f"vLLM does not start within the run's {spec.kv_cache_bytes} bytes for the key-value "
            f"cache. If they hold no full context of {spec.max_model_len} tokens, raise that "
            f"budget or shorten prompts and completions. vLLM says: {error}"
        ) from error


@contextmanager
def naming_lora(enable_lora: bool) -> Iterator[None]:
    """Name the setting if vLLM has no LoRA layers for the model."""
    try:
        yield
    except ValueError as error:
        if not (enable_lora and "support" in str(error) and "LoRA" in str(error)):
            raise
        raise ValueError(
            f"`VLLMEngine(enable_lora=True)`: vLLM has no LoRA layers for this model ({error}). "
            "Leave it out: adapters are then merged."
        ) from error


def unusable(request_id: str, token_ids: Sequence[int], reason: object) -> RuntimeError:
    """Return the error for an output that has no log-probs, or that vLLM ended early."""
    if reason is not None and str(reason) not in ENDS:
        what = f"ended request {request_id!r} with `{reason}` before its completion was whole"
    else:
        what = f"returned {len(token_ids)} tokens of request {request_id!r} without log-probs"
    return RuntimeError(
        f"vLLM {what}: it cannot be trained on. vLLM's own log says more with "
        "`VLLM_LOGGING_LEVEL=INFO`; if `engine_kwargs` are set, try without them."
    )
