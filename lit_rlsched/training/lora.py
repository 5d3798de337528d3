"""LoRA adapters of the model that is trained: made, loaded, checked, and as reference model."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import find_adapter_config_file

from lit_rlsched.settings import UsageError

ADAPTER, REFERENCE = "default", "reference"
"""Names of the trained adapter, and of its frozen copy."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of peft's `init_lora_weights` that leave the base weights as they are."""

_PLAIN = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "megatron_core"),
    *("base_model_name_or_path", "revision", "inference_mode", "init_lora_weights", "eva_config"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "ensure_weight_tying"),
}
"""Settings of an adapter with which it is a sum of two matrices' products and the base."""
MERGE = (
    "Merge it into its base first (`peft.AutoPeftModelForCausalLM.from_pretrained(...)"
    ".merge_and_unload().save_pretrained(...)`) and give the merged model."
)


def base_model(policy: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT wrapper, or the policy itself."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy  # type: ignore[operator]


def language_models(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the Hugging Face models in a module, PEFT wrappers included."""
    if isinstance(module, PreTrainedModel) or hasattr(module, "peft_config"):
        yield module
    else:
        for child in module.children():
            yield from language_models(child)


def add_lora(
    policy: PreTrainedModel, rank: int, alpha: int, target_modules: str | Sequence[str]
) -> Any:
    """Freeze the policy and add trainable LoRA adapters with peft."""
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
        raise UsageError(f"`lora_target_modules={config.target_modules}`: {error}") from error
    for part in adapted.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    check_adapters(adapted)
    return adapted


def adapter_config(model: str) -> Any:
    """The peft config of a folder or a hub repository with an adapter; `None` if it has none."""
    try:
        found = find_adapter_config_file(model)
    except (OSError, ValueError):  # no name of a repository: the caller says what is wrong
        return None
    if found is None:
        return None
    if any(Path(model).glob("model*.safetensors")):
        raise UsageError(
            f"`model={model}`: the folder holds a model and an adapter. Move the one that is not "
            "meant to a folder of its own (an adapter is `adapter_config.json` and "
            "`adapter_model.safetensors`)."
        )
    with needing_peft(f"model={model}"):
        from peft import LoraConfig, PeftConfig
    try:
        config: Any = PeftConfig.from_pretrained(str(Path(found).parent))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"`model={model}`: peft cannot read its adapter_config.json ({error!r})."
        ) from error
    said = f"`model={model}`: its adapter has"
    if not isinstance(config, LoraConfig):
        raise UsageError(
            f"{said} the type {config.peft_type}, and only LoRA can be trained. {MERGE}"
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
        raise UsageError(
            f"{said} `{odd[0]}={getattr(config, odd[0])!r}`, which is more than LoRA matrices on "
            f"the layers of a fixed base. {MERGE}"
        )
    return config


def read_config(config: Mapping[str, Any]) -> Any:
    """The peft config of an adapter in a checkpoint."""
    with needing_peft("lora_rank"):
        from peft import LoraConfig
    return LoraConfig.from_peft_type(**config)


def _of_adapter(config: Any) -> dict[str, Any]:
    return {
        "lora_rank": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_target_modules": _listed(config.target_modules),
    }


def lora_settings(given: Mapping[str, Any], adapter: Any) -> dict[str, Any]:
    """The `lora_*` settings, completed from the adapter or with their defaults."""
    if adapter is None:
        own = {"lora_alpha": 32, "lora_target_modules": "all-linear"}
        if given["lora_rank"]:
            return {n: own[n] if given[n] is None else given[n] for n in own}
        if useless := [n for n in own if given[n] is not None]:
            raise UsageError(
                f"`{useless[0]}={given[useless[0]]!r}` has no effect with `lora_rank=0`, which "
                "trains every weight. Set `lora_rank`, or leave it out."
            )
        return {}
    own = _of_adapter(adapter)
    for name, value in own.items():
        if given[name] and _listed(given[name]) != value:
            raise UsageError(
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
    """Refuse adapters that are lost when `named_weights` merges each weight by itself."""
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
            raise UsageError(
                f"`lora_target_modules`: `{name}` {why}, so neither the engine nor an export could "
                "hold the trained model. Leave it out: `lora_target_modules='all-linear'` takes "
                "all layers that can have adapters."
            )


def load_adapter(policy: Any, model: str) -> None:
    """Load the weights of the adapter."""
    from peft import load_peft_weights, set_peft_model_state_dict

    misfit = f"`model={model}`: the weights of the adapter do not fit its config and base"
    try:
        result = set_peft_model_state_dict(policy, load_peft_weights(model, device="cpu"))
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{misfit} ({error}).") from error
    missing = [name for name in result.missing_keys if "lora_" in name]
    if wrong := [*missing, *result.unexpected_keys]:
        raise UsageError(
            f"{misfit}: {len(wrong)} are missing or left over, the first is {wrong[0]}."
        )


def _listed(targets: Any) -> Any:
    return targets if isinstance(targets, str | int | float) else sorted(targets)


@contextmanager
def needing_peft(setting: str) -> Iterator[None]:
    """Say which setting needs peft if it cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"`{setting}` needs peft: pip install 'lit-rlsched[lora]'") from error


def settings_of(config: Any) -> dict[str, Any]:
    """Return the module's settings for peft's `LoraConfig`, or none for None."""
    if config is None:
        return {}
    same = {"r", "lora_alpha", "target_modules", "task_type", "peft_type"}
    changed = []
    if (kind := type(config).__name__) == "LoraConfig":
        default, given = type(config)(), config.to_dict()
        changed = sorted(n for n in given.keys() - same if given[n] != getattr(default, n))
    if kind != "LoraConfig" or changed or config.target_modules is None:
        raise UsageError(
            f"`peft_config={kind}({', '.join(f'{name}=...' for name in changed)})` cannot be used "
            "here. Use `LoraConfig` with `r`, `lora_alpha` and `target_modules` alone; peft's "
            "default of `target_modules` depends on the model. The policy never uses dropout."
        )
    return _of_adapter(config)
