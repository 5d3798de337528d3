"""Load the Hugging Face model that is trained, find it in a module, and read its weights."""

import copy
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
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
from transformers.utils import find_adapter_config_file

ADAPTER, REFERENCE = "default", "reference"
"""Names of the trained adapter, and of its frozen copy."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of peft's `init_lora_weights` that leave the base weights as they are."""

_NOISE = re.compile("drop|jitter")
"""Finds the settings of a config that are rates of noise."""
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""Names of a model's context; with ALiBi or a recurrent state there may be none."""
_PLAIN = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "init_lora_weights",
    "eva_config",
    "megatron_core",
    "ensure_weight_tying",
)
"""Settings of an adapter with which it is a sum of two matrices' products and the base."""
_MERGE = (
    "Merge it into its base first (`peft.AutoPeftModelForCausalLM.from_pretrained(...)"
    ".merge_and_unload().save_pretrained(...)`) and give the merged model."
)

_ROLES = ("pad", "eos", "bos", "unk", "sep", "cls", "mask")


def load_policy(model: str, dtype: torch.dtype = torch.float32, **kwargs: object) -> Any:
    """Load a causal language model without dropout, in train mode too.

    With dropout the trained policy would differ from the engine's. Under `torch.device("meta")`
    the model is built from `config.json` without weights.

    Args:
        model: Checkpoint folder or hub name: of a model, or of a LoRA adapter that peft saved.
        dtype: Of the weights; see `precision.load_dtype`.
        **kwargs: Passed to `from_pretrained`.

    Returns:
        The model, or the `PeftModel` of an adapter and its base, in which the adapter is trainable.

    Raises:
        ImportError: If accelerate is missing, which transformers needs to load onto a GPU, or peft,
            which an adapter needs.
        ValueError: If there is no such checkpoint, or it cannot be trained.
    """
    if (config := adapter_config(model)) is None:
        return _load_base(model, dtype, **kwargs)
    base = str(config.base_model_name_or_path)
    if adapter_config(base) is not None:
        raise ValueError(
            f"`model={model}`: an adapter of `{base}`, which is an adapter itself. {_MERGE}"
        )
    try:
        loaded = _load_base(base, dtype, **kwargs)
    except ValueError as error:
        raise ValueError(
            f"`model={model}`: its adapter_config.json has `base_model_name_or_path={base}`. "
            f"{error} Correct it there if the base has moved."
        ) from error
    policy = with_adapter(loaded, config)
    if policy.device.type != "meta":
        _fill(policy, model)
    policy.name_or_path = model  # whose tokenizer is used
    return policy


def _load_base(model: str, dtype: torch.dtype, **kwargs: object) -> PreTrainedModel:
    _check_files(model)
    with _naming(model):
        config = AutoConfig.from_pretrained(model, **kwargs)
    for part in (config, config.get_text_config()):
        if (quantized := getattr(part, "quantization_config", None)) is not None:
            raise ValueError(
                f"`model={model}`: its weights are quantised (`quantization_config` in "
                f"config.json: {quantized}), and these can be neither trained nor loaded into the "
                "engine. Use the model that they were made from, or write one: `from_pretrained` "
                "with `dequantize=True` in its `quantization_config`, then `save_pretrained`."
            )
    for part, name, rate in noise(config):
        setattr(part, name, type(rate)(0))
    with _naming(model):
        if torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs).eval()
        return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype, **kwargs)


def _check_files(model: str) -> None:
    """Refuse what is no folder of a model."""
    folder = Path(model)
    if model.endswith(".gguf") or (
        not (folder / "config.json").is_file() and any(folder.glob("*.gguf"))
    ):
        raise ValueError(
            f"`model={model}`: a GGUF file is read by other programs. Write a folder from it: "
            '`AutoModelForCausalLM.from_pretrained(folder, gguf_file="NAME.gguf")` and '
            "`save_pretrained`, the tokenizer alike."
        )
    if folder.is_file():
        raise ValueError(
            f"`model={model}`: a file. Give a checkpoint folder or a hub name; `lit-rlsched export "
            "CHECKPOINT --out FOLDER` writes a folder from a checkpoint of a run."
        )
    if (folder.is_absolute() or model.startswith(".")) and not folder.is_dir():
        raise ValueError(
            f"`model={model}`: no such folder. Give a checkpoint folder or a hub name."
        )


@contextmanager
def _naming(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if "requires `accelerate`" in str(error):
            raise ImportError(
                "transformers needs accelerate to load a model onto a GPU: pip install accelerate"
            ) from error
        raise ValueError(f"`model={model}`: {_what_is_wrong(Path(model))} ({error})") from error


def noise(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, str, float]]:
    """Yield the rates of all that is random in train mode, with their names and configs.

    Dropout of layers, tokens and paths, and jitter of a router; models hold many as plain numbers.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from noise(value)
        elif type(value) in (int, float) and value and _NOISE.search(name):
            yield config, name, value


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
    """Load a tokenizer from a folder or the hub; a `ValueError` says if there is none.

    An adapter without a tokenizer has that of its base.
    """
    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        if (adapter := adapter_config(tokenizer)) is not None:
            return load_tokenizer(str(adapter.base_model_name_or_path))
        raise ValueError(
            f"`tokenizer={tokenizer}`: neither a folder with a tokenizer here nor one on the hub. "
            f"Check the spelling and the working directory. ({error})"
        ) from error


# LoRA.


def add_lora(
    policy: PreTrainedModel, rank: int, alpha: int, target_modules: str | Sequence[str]
) -> Any:
    """Freeze the policy and add trainable LoRA adapters with peft.

    Raises:
        ImportError: peft is missing.
        ValueError: no layer has such a name, or a layer cannot have an adapter.
    """
    with needing_peft("lora_rank"):
        from peft import LoraConfig
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    return with_adapter(
        policy, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    )


def with_adapter(policy: PreTrainedModel, config: Any) -> Any:
    """Freeze the policy and add a trainable adapter, without dropout; see `add_lora`."""
    from peft import get_peft_model

    config = copy.deepcopy(config)
    config.base_model_name_or_path, config.inference_mode = policy.name_or_path, False
    try:
        adapted = get_peft_model(policy, config)
    except ValueError as error:
        raise ValueError(f"`lora_target_modules={config.target_modules}`: {error}") from error
    for part in adapted.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    check_adapters(adapted)
    return adapted


def adapter_config(model: str) -> Any:
    """The peft config of a folder or a hub repository with an adapter; `None` if it has none.

    Raises:
        ImportError: peft is missing.
        ValueError: it is another adapter than plain LoRA, or a whole model lies beside it.
    """
    try:
        found = find_adapter_config_file(model)
    except (OSError, ValueError):  # no name of a repository: the caller says what is wrong
        return None
    if found is None:
        return None
    if any(Path(model).glob("model*.safetensors")):
        raise ValueError(
            f"`model={model}`: the folder holds a model and an adapter. Move the one that is not "
            "meant to a folder of its own (an adapter is `adapter_config.json` and "
            "`adapter_model.safetensors`)."
        )
    with needing_peft(f"model={model}"):
        from peft import LoraConfig, PeftConfig
    try:
        config: Any = PeftConfig.from_pretrained(str(Path(found).parent))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`model={model}`: peft cannot read its adapter_config.json ({error!r})."
        ) from error
    said = f"`model={model}`: its adapter has"
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"{said} the type {config.peft_type}, and only LoRA can be trained. {_MERGE}"
        )
    plain = LoraConfig()
    odd = [
        field.name
        for field in fields(config)
        if field.name not in _PLAIN and getattr(config, field.name) != getattr(plain, field.name)
    ]
    if config.init_lora_weights not in PLAIN_STARTS:
        odd.append("init_lora_weights")  # the base is another than the one it names
    if odd:
        raise ValueError(
            f"{said} `{odd[0]}={getattr(config, odd[0])!r}`, which is more than LoRA matrices on "
            f"the layers of a fixed base. {_MERGE}"
        )
    return config


def read_config(config: Mapping[str, Any]) -> Any:
    """The peft config of an adapter in a checkpoint."""
    with needing_peft("lora_rank"):
        from peft import LoraConfig
    return LoraConfig.from_peft_type(**config)


def lora_settings(given: Mapping[str, Any], adapter: Any) -> dict[str, Any]:
    """The `lora_*` settings with what follows from the adapter, or their defaults.

    Args:
        given: Settings of the module.
        adapter: The `adapter_config` of its model.

    Raises:
        ValueError: A setting differs from the adapter's.
    """
    if adapter is None:
        own = {"lora_alpha": 32, "lora_target_modules": "all-linear"}
        return (
            {n: own[n] if given[n] is None else given[n] for n in own} if given["lora_rank"] else {}
        )
    own = {
        "lora_rank": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_target_modules": _listed(adapter.target_modules),
    }
    for name, value in own.items():
        if given[name] and _listed(given[name]) != value:
            raise ValueError(
                f"`{name}={given[name]}`, but `model={given['model']}` is an adapter with {value}. "
                "Leave the `lora_*` settings out to train this adapter further. For a new adapter, "
                "merge this one into its base (`merge_and_unload`) and give the merged model."
            )
    return own


def add_reference(policy: Any) -> None:
    """Add a frozen copy of the adapter, which `as_reference` switches on."""
    config = copy.deepcopy(policy.peft_config[ADAPTER])
    config.lora_dropout = 0.0
    policy.add_adapter(REFERENCE, config)
    parameters = dict(policy.named_parameters())
    for name, parameter in parameters.items():
        if f".{REFERENCE}" in name:
            start = parameters[name.replace(f".{REFERENCE}", f".{ADAPTER}")]
            parameter.data = start.detach().clone()
    policy.set_adapter(ADAPTER)


@contextmanager
def as_reference(policy: Any) -> Iterator[None]:
    """Switch to the adapter as it was at the start of training, or to no adapter."""
    if REFERENCE not in policy.peft_config:
        with policy.disable_adapter():
            yield
        return
    policy.set_adapter(REFERENCE)
    try:
        yield
    finally:
        policy.set_adapter(ADAPTER)


def check_adapters(policy: nn.Module) -> None:
    """Refuse adapters that are lost when `named_weights` merges each weight by itself.

    Raises:
        ValueError: Names the layer and the fix.
    """
    base = base_model(policy)
    uses = Counter(
        id(weight) for part in base.modules() for weight in part._parameters.values()
    )  # of tied weights, several
    for name, layer in base.named_modules():
        why = None
        if hasattr(layer, "modules_to_save") and hasattr(layer, "original_module"):
            why = "is trained beside its adapters (`modules_to_save`)"
        elif hasattr(layer, "token_adapter"):
            why = "has trainable tokens (`trainable_token_indices`)"
        elif hasattr(layer, "get_delta_weight"):
            inner = layer.get_base_layer()
            if not isinstance(getattr(inner, "weight", None), nn.Parameter) or hasattr(
                layer, "parameter_name"
            ):
                why = "has an adapter on a parameter that is not its `weight`"
            elif uses[id(inner.weight)] > 1:
                why = (
                    "shares its weights with another layer (`tie_word_embeddings`), which has no "
                    "adapter"
                )
            elif layer.lora_variant or any(getattr(layer, "lora_bias", {}).values()):
                why = "has an adapter with more than two matrices (DoRA, `lora_bias`)"
        if why is not None:
            raise ValueError(
                f"`lora_target_modules`: `{name}` {why}, so neither the engine nor an export could "
                "hold the trained model. Leave it out: `lora_target_modules='all-linear'` takes "
                "all layers that can have adapters."
            )


def _fill(policy: Any, model: str) -> None:
    """Load the weights of the adapter."""
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        result = set_peft_model_state_dict(policy, load_peft_weights(model, device="cpu"))
        missing = [name for name in result.missing_keys if "lora_" in name]
        wrong = [*missing, *result.unexpected_keys]
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`model={model}`: the weights of the adapter do not fit its config and base ({error})."
        ) from error
    if wrong:
        raise ValueError(
            f"`model={model}`: the weights of the adapter do not fit its config and base: "
            f"{len(wrong)} are missing or left over, the first is {wrong[0]}."
        )


def _listed(targets: Any) -> Any:
    return targets if isinstance(targets, str | int | float) else sorted(targets)


@contextmanager
def needing_peft(setting: str) -> Iterator[None]:
    """Say which setting needs peft if it cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"`{setting}` needs peft: pip install 'lit-rlsched[lora]'") from error


# The policy in a module.


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
    """Maximum number of tokens the model can attend to; `sys.maxsize` if it has no maximum."""
    config = base_model(policy).config.get_text_config()
    found = (getattr(config, name, None) for name in _CONTEXT)
    return next((int(most) for most in found if most), sys.maxsize)


def num_embeddings(policy: nn.Module) -> int:
    """Number of tokens the model has an embedding for."""
    return int(base_model(policy).get_input_embeddings().weight.shape[0])


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
