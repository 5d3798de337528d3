"""Load the Hugging Face model that is trained, find it in a module, and read its weights."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

_NOISE = re.compile("drop|jitter")
"""Finds the settings of a config that are rates of noise."""

_ROLES = ("pad", "eos", "bos", "unk", "sep", "cls", "mask")


def load_policy(
    model: str, dtype: torch.dtype = torch.float32, **kwargs: object
) -> PreTrainedModel:
    """Load a causal language model without dropout, in train mode too.

    With dropout the trained policy would differ from the engine's. Under `torch.device("meta")`
    the model is built from `config.json` without weights.

    Args:
        model: Checkpoint folder or hub name.
        dtype: Of the weights; see `precision.load_dtype`.
        **kwargs: Passed to `from_pretrained`.

    Raises:
        ImportError: If accelerate is missing, which transformers needs to load onto a GPU.
        ValueError: If there is no such checkpoint.
    """
    if (Path(model).is_absolute() or model.startswith(".")) and not Path(model).is_dir():
        raise ValueError(
            f"`model={model}`: no such folder. Give a checkpoint folder or a hub name."
        )
    try:
        config = AutoConfig.from_pretrained(model, **kwargs)
        _without_noise(config)
        if torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs).eval()
        return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype, **kwargs)
    except (OSError, ValueError) as error:
        if "requires `accelerate`" in str(error):
            raise ImportError(
                "transformers needs accelerate to load a model onto a GPU: pip install accelerate"
            ) from error
        raise ValueError(f"`model={model}`: {_what_is_wrong(Path(model))} ({error})") from error


def _without_noise(config: PreTrainedConfig) -> None:
    """Set the rates of all that is random in train mode to 0, in the configs of all parts.

    Dropout of layers, tokens and paths, and jitter of a router; models hold many as plain numbers.
    """
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _without_noise(value)
        elif type(value) in (int, float) and _NOISE.search(name):
            setattr(config, name, type(value)(0))


def _what_is_wrong(folder: Path) -> str:
    if not folder.is_dir():
        return (
            "neither a checkpoint folder here nor a model on the hub. Check the spelling and the "
            "working directory."
        )
    if not (folder / "config.json").is_file():
        return (
            "the folder has no config.json. Give a folder that `save_pretrained` or "
            "`lit-rlsched export` wrote."
        )
    return "transformers cannot load a causal language model from this folder."


def load_tokenizer(tokenizer: str) -> Any:
    """Load a tokenizer from a folder or the hub; a `ValueError` says if there is none."""
    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`tokenizer={tokenizer}`: neither a folder with a tokenizer here nor one on the hub. "
            f"Check the spelling and the working directory. ({error})"
        ) from error


def add_lora(policy: PreTrainedModel, rank: int, alpha: int, target_modules: str) -> nn.Module:
    """Freeze the policy and add trainable LoRA adapters with peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("`lora_rank` needs peft: pip install 'lit-rlsched[lora]'") from error
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=target_modules, task_type="CAUSAL_LM"
    )
    return get_peft_model(policy, config)


def find_policy(module: nn.Module) -> nn.Module:
    """Find the only trainable causal language model in a LightningModule, PEFT wrapper included.

    Raises:
        ValueError: If there is none or more than one.
    """
    trainable = [
        m for m in _language_models(module) if any(p.requires_grad for p in m.parameters())
    ]
    if len(trainable) != 1:
        raise ValueError(
            f"`{type(module).__name__}` holds {len(trainable)} trainable Hugging Face models, but "
            "rollouts need exactly one. Keep the policy as a submodule and freeze other models."
        )
    return trainable[0]


def _language_models(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, PreTrainedModel) or hasattr(child, "peft_config"):
            yield child
        else:
            yield from _language_models(child)


def base_model(policy: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT wrapper, or the policy itself."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy  # type: ignore[operator]


def named_weights(policy: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight under its checkpoint name, with adapters merged.

    Each weight is merged on the way out and the trained weights are left as they are, so rounding
    errors do not accumulate. Adapters are added to a base in half precision in float32 and the sum
    stays in float32: only the engine rounds it.
    """
    base = base_model(policy)
    layers: dict[str, Any] = {
        name: m for name, m in base.named_modules() if hasattr(m, "get_delta_weight")
    }
    for name, parameter in base.named_parameters():
        if layers and "lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        weight = parameter.detach()
        if owner in layers:
            for adapter in layers[owner].active_adapters:
                weight = weight + layers[owner].get_delta_weight(adapter)
        yield name.replace(".base_layer.", "."), weight.detach()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; afterwards restore the mode of each of its modules."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def context_length(policy: nn.Module) -> int:
    """Maximum number of tokens the model can attend to."""
    return int(base_model(policy).config.get_text_config().max_position_embeddings)


def num_embeddings(policy: nn.Module) -> int:
    """Number of tokens the model has an embedding for."""
    return int(base_model(policy).get_input_embeddings().weight.shape[0])  # type: ignore[union-attr]


def eos_token_ids(policy: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a completion: the tokenizer's and those of the generation config."""
    generation_config = base_model(policy).generation_config
    configured = None if generation_config is None else generation_config.eos_token_id
    more = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(t for t in (tokenizer.eos_token_id, *more) if t is not None))


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens that `skip_special_tokens` leaves out, besides those with a role such as padding."""
    roles = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    ids = sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids} - roles)
    texts = {i: str(tokenizer.decode([i], skip_special_tokens=False)).strip() for i in ids}
    return {
        i: t for i, t in texts.items() if t and not tokenizer.decode([i], skip_special_tokens=True)
    }
