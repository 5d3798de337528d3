"""The Hugging Face model that is trained: loading it, finding it, reading its weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def load_policy(
    model: str, dtype: torch.dtype = torch.float32, **kwargs: object
) -> PreTrainedModel:
    """Load a causal language model, dropout off.

    Dropout would make the trained policy another one than the engine's. Under
    `torch.device("meta")` only the shape is made, from `config.json`.

    Args:
        model: Folder or hub name of a checkpoint.
        dtype: Of its weights; `precision.load_dtype` says which goes with a Trainer's precision.
        **kwargs: Passed to `from_pretrained`.

    Raises:
        ImportError: accelerate is missing, which transformers needs to load onto a GPU.
        ValueError: there is no such checkpoint.
    """
    if (Path(model).is_absolute() or model.startswith(".")) and not Path(model).is_dir():
        raise ValueError(
            f"`model={model}`: no such folder. Give a checkpoint folder or a hub name."
        )
    try:
        if torch.get_default_device().type == "meta":
            config = AutoConfig.from_pretrained(model)
            policy = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs).eval()
        else:
            policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **kwargs)
    except (OSError, ValueError) as error:
        if "requires `accelerate`" in str(error):
            raise ImportError(
                "transformers needs accelerate to load a model onto a GPU: pip install accelerate"
            ) from error
        raise ValueError(
            f"`model={model}`: neither a checkpoint folder here nor a model on the hub. "
            f"Check the spelling and the working directory. ({error})"
        ) from error
    for part in policy.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(policy.config, name, 0.0):
            setattr(policy.config, name, 0.0)
    return policy


def load_tokenizer(tokenizer: str) -> Any:
    """Load a tokenizer.

    Args:
        tokenizer: Folder or hub name.

    Raises:
        ValueError: there is no such tokenizer.
    """
    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`tokenizer={tokenizer}`: neither a folder with a tokenizer here nor one on the hub. "
            f"Check the spelling and the working directory. ({error})"
        ) from error


def add_lora(policy: PreTrainedModel, rank: int, alpha: int, target_modules: str) -> nn.Module:
    """Freeze the policy and put trainable low-rank adapters on it, through peft.

    Raises:
        ImportError: peft is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("`lora_rank` needs peft: pip install 'lit-rlsched[lora]'") from error
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=target_modules, task_type="CAUSAL_LM"
    )
    return get_peft_model(policy, config)


def find_policy(module: nn.Module) -> nn.Module:
    """The one causal language model inside a LightningModule, peft wrapper included.

    Raises:
        ValueError: there is none, or there are several trainable ones.
    """
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, PreTrainedModel) or hasattr(child, "peft_config"):
            found.append(child)
        else:
            found.extend(_find(child))
    trainable = [m for m in found if any(p.requires_grad for p in m.parameters())]
    if len(trainable) != 1:
        raise ValueError(
            f"`{type(module).__name__}` holds {len(trainable)} trainable Hugging Face models; the "
            "rollouts need exactly one. Keep the policy as a submodule and freeze any other model."
        )
    return trainable[0]


def _find(module: nn.Module) -> list[nn.Module]:
    try:
        return [find_policy(module)]
    except ValueError:
        return []


def base_model(policy: nn.Module) -> PreTrainedModel:
    """The Hugging Face model under a peft wrapper, or the policy itself."""
    return policy.get_base_model() if hasattr(policy, "peft_config") else policy  # type: ignore[operator, return-value]


def named_weights(policy: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its checkpoint name, adapters merged into the weights they sit on.

    The merge is made tensor by tensor on the way out: the trained weights are never touched, so
    that no rounding error piles up from merging and unmerging. Onto a base in half precision the
    adapters are added in float32, and the sum is yielded in it: the engine rounds once.
    """
    if not hasattr(policy, "peft_config"):
        for name, parameter in policy.named_parameters():
            yield name, parameter.detach()
        return
    base = base_model(policy)
    layers: dict[str, Any] = {
        name: m for name, m in base.named_modules() if hasattr(m, "get_delta_weight")
    }
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        weight = parameter.detach()
        if owner in layers:
            for adapter in layers[owner].active_adapters:
                weight = weight + layers[owner].get_delta_weight(adapter)
        yield name.replace(".base_layer.", "."), weight.detach()


def context_length(policy: nn.Module) -> int:
    """Most tokens the model can attend to."""
    return int(base_model(policy).config.get_text_config().max_position_embeddings)


def eos_token_ids(policy: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion: chat models have more than the tokenizer's."""
    generation_config = base_model(policy).generation_config
    configured = None if generation_config is None else generation_config.eos_token_id
    more = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(t for t in (tokenizer.eos_token_id, *more) if t is not None))
