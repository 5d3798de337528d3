"""Random models made by their sizes, for benchmarks and for machines that can download nothing."""

from pathlib import Path
from typing import Any


def make_model(
    folder: str | Path,
    model_type: str = "qwen3",
    dtype: str = "float32",
    device: str = "cpu",
    **sizes: Any,
) -> None:
    """Write a random model (seed 0).

    Args:
        folder: Where it goes; there is no tokenizer in it.
        model_type: As transformers calls it.
        dtype: Of its weights.
        device: Where they are made, and drawn.
        sizes: Of its configuration. Embeddings are tied unless they say otherwise.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    config = AutoConfig.for_model(model_type, **{"tie_word_embeddings": True, **sizes})
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype)
        )
    model.save_pretrained(folder)
