"""Random models of a given shape, for benchmarks and for machines without network."""

from pathlib import Path
from typing import Any


def make_model(
    folder: str | Path,
    model_type: str = "qwen3",
    dtype: str = "float32",
    device: str = "cpu",
    **sizes: Any,
) -> None:
    """Write a random model with seed 0.

    Args:
        folder: Folder to write to. It gets no tokenizer.
        model_type: Name of the architecture in transformers.
        dtype: Data type of the weights.
        device: Device on which the weights are made.
        sizes: Settings of the model's configuration. Embeddings are tied by default.
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
