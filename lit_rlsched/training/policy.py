"""Load the Hugging Face model that is trained, find it in a module, and read its weights."""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from lit_rlsched.engines.spec import AdapterSpec
from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import (
    MERGE,
    PLAIN_STARTS,
    adapter_config,
    base_model,
    language_models,
    load_adapter,
    with_adapter,
)

_NOISE = re.compile("drop|jitter")
"""Finds the settings of a config that are rates of noise."""
_TOLERANCE = ("phimoe", "router_jitter_noise")
"""Is no noise: of experts whose scores are this close, several are used, in eval mode too."""
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""Names of a model's context; with ALiBi or a recurrent state there may be none."""
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
        UsageError: If accelerate is missing, which transformers needs to load onto a GPU, or peft,
            which an adapter needs.
        UsageError: If there is no such checkpoint, or it cannot be trained.
    """
    if (config := adapter_config(model)) is None:
        return _load_base(model, dtype, **kwargs)
    base = str(config.base_model_name_or_path)
    if adapter_config(base) is not None:
        raise UsageError(
            f"`model={model}`: an adapter of `{base}`, which is an adapter itself. {MERGE}"
        )
    try:
        loaded = _load_base(base, dtype, **kwargs)
    except ValueError as error:
        raise UsageError(
            f"`model={model}`: its adapter_config.json has `base_model_name_or_path={base}`. "
            f"{error} Correct it there if the base has moved."
        ) from error
    policy = with_adapter(loaded, config)
    if policy.device.type != "meta":
        load_adapter(policy, model)
    policy.name_or_path = model  # whose tokenizer is used
    return policy


def _load_base(model: str, dtype: torch.dtype, **kwargs: object) -> PreTrainedModel:
    _check_files(model)
    try:
        config = AutoConfig.from_pretrained(model, **kwargs)
        for part in (config, config.get_text_config()):
            if (quantized := getattr(part, "quantization_config", None)) is not None:
                raise UsageError(
                    f"`model={model}`: its weights are quantised (`quantization_config` in "
                    f"config.json: {quantized}), and these can be neither trained nor loaded into "
                    "the engine. Use the model that they were made from, or write one: "
                    "`from_pretrained` with `dequantize=True` in its `quantization_config`, then "
                    "`save_pretrained`."
                )
        for part, name, rate in noise(config):
            setattr(part, name, type(rate)(0))
        if torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs).eval()
        return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype, **kwargs)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        if "requires `accelerate`" in str(error):
            raise UsageError(
                "transformers needs accelerate to load a model onto a GPU: pip install accelerate"
            ) from error
        wrong = "transformers cannot load a causal language model from this folder."
        if not Path(model).is_dir():
            wrong = (
                "neither a checkpoint folder here nor a model on the hub. Check the spelling and "
                "the working directory."
            )
        elif not (Path(model) / "config.json").is_file():
            wrong = (
                "the folder has no config.json. Give a folder that `save_pretrained` or "
                "`lit-rlsched export` wrote."
            )
        raise UsageError(f"`model={model}`: {wrong} ({error})") from error


def _check_files(model: str) -> None:
    """Refuse what is no folder of a model."""
    folder = Path(model)
    files = [] if (folder / "config.json").is_file() else sorted(folder.glob("*.gguf"))
    if model.endswith(".gguf"):
        files = [folder]
    if files:
        raise UsageError(
            f"`model={model}`: a GGUF file is read by other programs. Train from the files that it "
            f"was made of, or let transformers read `{files[0].name}` (`from_pretrained(..., "
            "gguf_file=...)`), save that, and give the folder."
        )
    if folder.is_file():
        raise UsageError(
            f"`model={model}`: a file. Give a checkpoint folder or a hub name; `lit-rlsched export "
            "CHECKPOINT --out FOLDER` writes a folder from a checkpoint of a run."
        )
    if (folder.is_absolute() or model.startswith(".")) and not folder.is_dir():
        raise UsageError(
            f"`model={model}`: no such folder. Give a checkpoint folder or a hub name."
        )


def noise(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, str, float]]:
    """Yield the rates of all noise in train mode, with their names and configs.

    Dropout of layers, tokens and paths, and jitter of a router; models hold many as plain numbers.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from noise(value)
        elif (
            type(value) in (int, float)
            and value
            and _NOISE.search(name)
            and (config.model_type, name) != _TOLERANCE
        ):
            yield config, name, value


def load_tokenizer(tokenizer: str) -> Any:
    """Load a tokenizer from a folder or the hub; a `ValueError` says if there is none.

    An adapter without a tokenizer has that of its base.
    """
    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        if (adapter := adapter_config(tokenizer)) is not None:
            return load_tokenizer(str(adapter.base_model_name_or_path))
        raise UsageError(
            f"`tokenizer={tokenizer}`: neither a folder with a tokenizer here nor one on the hub. "
            f"Check the spelling and the working directory. ({error})"
        ) from error


def find_policy(module: nn.Module) -> nn.Module:
    """Find the only trainable causal language model in a LightningModule, PEFT wrapper included."""
    trainable = [m for m in language_models(module) if any(p.requires_grad for p in m.parameters())]
    if len(trainable) != 1:
        raise UsageError(
            f"`{type(module).__name__}` holds {len(trainable)} trainable Hugging Face models, but "
            "rollouts need exactly one. Keep the policy as a submodule and freeze other models."
        )
    return trainable[0]


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


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; all ranks must call this."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if callable(gather) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    part = getattr(tensor, "to_local", None)
    return part() if callable(part) else tensor


def adapter_spec(policy: nn.Module) -> AdapterSpec:
    """Return the sizes of the policy's adapters."""
    layers = _layers(policy)
    if not layers:
        raise UsageError(
            "`enable_lora=True` of the engine: the policy has no LoRA adapters. Set "
            "`model.lora_rank`, or leave `enable_lora` out."
        )
    from peft.tuners.lora import Linear

    wrong = []
    for name, layer in layers.items():
        if len(layer.active_adapters) != 1:
            wrong.append(f"`{name}` has {len(layer.active_adapters)} active adapters")
        elif not isinstance(layer, Linear):
            wrong.append(f"`{name}` has an adapter of type `{type(layer).__name__}`")
        elif variant := layer.lora_variant.get(*layer.active_adapters):
            wrong.append(f"`{name}` has an adapter of type `{type(variant).__name__}`")
    matrices = [] if wrong else [_matrices(layer) for layer in layers.values()]
    held = {id(matrix) for a, b, _ in matrices for matrix in (a, b)}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            wrong.append(f"`{name}` is trained too")
    for config in getattr(policy, "peft_config", {}).values():
        if getattr(config, "init_lora_weights", True) not in PLAIN_STARTS:
            wrong.append(
                f"`init_lora_weights={config.init_lora_weights!r}` changes the base weights"
            )
    if wrong:
        raise UsageError(
            f"`enable_lora=True` of the engine: {wrong[0]}, and vLLM's LoRA slot holds the "
            "matrices A and B of linear layers alone. Leave `enable_lora` out: adapters are then "
            "merged."
        )
    return AdapterSpec(
        rank=max(a.shape[0] for a, *_ in matrices),
        modules=tuple(sorted({name.rpartition(".")[2] for name in layers})),
        parameters=sum(a.numel() + b.numel() for a, b, _ in matrices),
    )


def fingerprint(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Return digits that depend on names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in weights.items():
        used = tensor.detach().to(dtype if tensor.is_floating_point() else None)
        total = 0
        if not used.is_meta:  # else it is loaded later
            octets = used.reshape(-1).clone() if used.storage_offset() else used.reshape(-1)
            octets = octets.view(torch.uint8)
            whole = len(octets) // 8 * 8  # eight bytes at once are much faster
            parts = octets[:whole].view(torch.int64), octets[whole:]
            total = sum(int(part.sum()) for part in parts)  # exact, in whatever order a device adds
        digest.update(f"{name} {used.dtype} {tuple(used.shape)} {total};".encode())
    return digest.hexdigest()


def named_adapters(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices A and B of each layer, as parts of its name; B includes LoRA's scale."""
    for name, layer in _layers(policy).items():
        a, b, scale = _matrices(layer)
        yield f"{name}.lora_A.weight", a.detach()
        yield f"{name}.lora_B.weight", b.detach() * scale


def _layers(policy: nn.Module) -> dict[str, Any]:
    modules = base_model(policy).named_modules()
    return {n: m for n, m in modules if hasattr(m, "lora_A") and hasattr(m, "active_adapters")}


def _matrices(layer: Any) -> tuple[Tensor, Tensor, float]:
    """The matrices A and B of a layer's only adapter, and its scale."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
