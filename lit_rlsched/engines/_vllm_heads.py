"""Attention heads that vLLM's kernels for CPU have."""

from importlib import import_module
from typing import Any


def check_head_size(config: Any) -> None:
    """Refuse a model whose heads vLLM cannot compute on CPU, before it is built.

    Args:
        config: Of the model's text part, as transformers has it.

    Raises:
        ValueError: names the size, those there are, and the engine that takes any.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    backend = import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    sizes = backend.get_supported_head_sizes()
    latent = getattr(config, "kv_lora_rank", None)  # attends in another size than its heads
    if sizes and size not in sizes and latent is None:
        raise ValueError(
            f"`VLLMEngine` on CPU: the model's attention heads have a size of {size}, and vLLM "
            f"has {', '.join(map(str, sizes))}. Use `TransformersEngine`, or a GPU."
        )
