"""A Hugging Face folder from a GGUF file; what the folder would not have is refused."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_gguf_available

from lit_rlsched.run.saving.export import DTYPES, new_folder, write_model, written_at_once
from lit_rlsched.settings import UsageError, check_choice

Dtype = Literal["float32", "bfloat16", "float16"]


def convert(file: str, out: str, dtype: Dtype = "float32") -> Path:
    """Write the model of a GGUF file as a Hugging Face folder, to train and to export.

    The weights are de-quantised: they are what llama.cpp computes with, not those from which the
    file was made. Tokenizer, chat template and end token come from the file as well. The folder
    appears under its name once it is complete.

    Args:
        file: The GGUF file.
        out: Folder to write; new or empty.
        dtype: Of the weights.

    Returns:
        The folder.

    Raises:
        UsageError: there is no such file, `out` is not empty, the package `gguf` is missing, or
            the folder would not compute what the file does: the message names what it would drop.
    """
    check_choice("convert", "dtype", dtype, get_args(Dtype))
    path, folder = Path(file), new_folder(out)
    if not path.is_file():
        raise UsageError(f"`file={file}`: no such file.")
    if not is_gguf_available():
        raise UsageError(
            "transformers needs the package gguf to read such files: "
            "pip install 'lit_rlsched[gguf]'"
        )
    how: dict[str, Any] = {"gguf_file": path.name}
    try:
        keys, tensors, factors = _read(path)
        config = config_of(keys, tensors, factors)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **how)
        read, told = AutoModelForCausalLM.from_pretrained(
            path.parent, config=config, dtype=DTYPES[dtype], output_loading_info=True, **how
        )
        weights = _complete(read, told["missing_keys"], keys, tensors)
    except Exception as error:  # of numpy, if the file is cut short
        why = f"{error} Train from the files of which the GGUF file was made."
        if not isinstance(error, UsageError):
            why = f"Its kind of quantisation may be unknown, or the file is cut short. ({error})"
        raise UsageError(
            f"`file={file}`: transformers cannot read this GGUF file so that the folder computes "
            f"what the file does. {why}"
        ) from error
    with torch.device("meta"):  # `read` counts as quantised, and would not be saved
        shell = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    shell.generation_config = read.generation_config
    tokenizer.model_max_length = config.max_position_embeddings
    _add_ends(tokenizer, keys)
    with written_at_once(folder) as new:
        write_model(shell, weights, DTYPES[dtype], new)
        tokenizer.save_pretrained(new)
    return folder


def _read(path: Path) -> tuple[dict[str, Any], set[str], NDArray[Any] | None]:
    """Return the keys, the names of the tensors and the tensor `FACTORS` of a file."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    factors = tensors.pop(FACTORS, None)
    return keys, {*tensors}, None if factors is None else np.array(factors)


def _complete(
    model: Any, missing: Collection[str], keys: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, Tensor]:
    """Return the weights; a bias that the file lacks is zero, and all else must be there."""
    from transformers import modeling_gguf_pytorch_utils as reading

    kind = reading.TENSOR_PROCESSORS.get(keys["general.architecture"], reading.TensorProcessor)
    known = reading.get_gguf_hf_weights_map(model, kind())
    if unused := sorted(n for n in tensors if not {n, n.removesuffix(".weight")} & {*known}):
        raise UsageError(f"the tensors {unused} would not be used.")
    weights = dict(model.state_dict())
    zero = {name for name in missing if name.endswith(".bias")}
    if lacking := sorted({*missing} - zero):
        raise UsageError(f"it has no tensors for {lacking}.")
    return weights | {name: torch.zeros_like(weights[name]) for name in zero}


def _add_ends(tokenizer: Any, keys: Mapping[str, Any]) -> None:
    """Let the tokenizer put the tokens around a text that the file says."""
    said = {name: keys.get(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")}
    if said["bos"] is None and said["eos"] is None:
        return
    ends = {name: getattr(tokenizer, f"{name}_token") if add else "" for name, add in said.items()}
    whole = filter(None, [ends["bos"], "$A", ends["eos"]])
    special = [(end, tokenizer.convert_tokens_to_ids(end)) for end in ends.values() if end]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*whole], special_tokens=special
    )


FACTORS = "rope_freqs.weight"
"""Tensor by which the rotary frequencies are divided."""
_MODELS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
}
"""Architectures of llama.cpp, and the model of transformers that computes the same."""
_ATTRIBUTES = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("norm_epsilon", "layer_norm_epsilon"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.sliding_window": ("sliding_window",),
    "vocab_size": ("vocab_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Keys of an architecture, and what transformers calls them."""
_NEEDED = list(_ATTRIBUTES)[:7]
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "tensor_data_layout": "Meta AI original pth",
    "general.type": "model",
    "split.count": 1,
    "split.no": 0,
}
"""Values that change nothing."""
_TOKENIZER = {
    *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges"),
    *("precompiled_charsmap", "remove_extra_whitespaces", "add_space_prefix"),
    *("add_bos_token", "add_eos_token", "add_sep_token"),
}
_BIASES = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}
_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the largest Gemma, whose scores are not scaled by the size of a head."""
_SPECIAL = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_ENDS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
"""Tokens at which llama.cpp stops."""


def config_of(
    keys: Mapping[str, Any], tensors: Collection[str], factors: NDArray[Any] | None
) -> Any:
    """Return the configuration for `AutoModelForCausalLM`."""
    architecture = keys.get("general.architecture")
    if architecture not in _MODELS:
        known = ", ".join(_MODELS)
        raise UsageError(f"`general.architecture={architecture}` is none of {known}.")
    model, prefix = _MODELS[architecture], f"{architecture}."
    defaults = AutoConfig.for_model(model)
    left = {n.removeprefix(prefix): value for n, value in keys.items() if not _is_told(n)}
    for name, value in left.items():
        if isinstance(value, list) and len({*value}) == 1:  # the same in each layer
            left[name] = value[0]
    needed = [name for name in _NEEDED if _attribute(defaults, name)]
    needed += ["attention.key_length", "attention.sliding_window"] if model in _LARGEST else []
    if missing := [prefix + name for name in needed if name not in left]:
        raise UsageError(f"the keys {missing} are missing.")
    heads, width = left["attention.head_count"], left["embedding_length"]
    head_dim = left.pop("attention.key_length", width // heads)
    ends = [*{keys[name]: None for name in _ENDS if name in keys}]
    values: dict[str, Any] = {
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": len(keys.get("tokenizer.ggml.tokens", ())),
        "norm_topk_prob": architecture == "qwen3moe",
        "num_key_value_heads": heads,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        **{name: keys.get(f"tokenizer.ggml.{of}") for name, of in _SPECIAL.items()},
        **{n: any(t.endswith(of) for t in tensors) for n, of in _BIASES.items()},
    }
    for name in _ATTRIBUTES:
        if (attribute := _attribute(defaults, name)) and isinstance(left.get(name), int | float):
            values[attribute] = left.pop(name)
    values = {name: value for name, value in values.items() if hasattr(defaults, name)}
    if hasattr(defaults, "rope_parameters"):  # some look for a `head_dim` that they do not list
        rope = _rope(left, model, head_dim, values["max_position_embeddings"], factors)
        values |= {"head_dim": head_dim, "rope_parameters": rope}
    if model in _LARGEST and values["num_hidden_layers"] == _LARGEST[model]:
        values["query_pre_attn_scalar"] = width // heads
    elif model in _LARGEST and head_dim != defaults.query_pre_attn_scalar:
        left["attention.key_length"] = head_dim  # how scores are scaled cannot be told
    own = {"attention.head_count_kv": heads, "attention.value_length": head_dim}
    neutral = _NEUTRAL | own
    if unused := [n for n, v in left.items() if n not in neutral or v != neutral[n]]:
        named = [f"{prefix}{n}" if f"{prefix}{n}" in keys else n for n in unused]
        raise UsageError(f"{named} would not be used.")
    return AutoConfig.for_model(model, **values)


def _attribute(config: Any, key: str) -> str | None:
    """Where the configuration has a key; a window may be switched off by another attribute."""
    if key == "attention.sliding_window" and hasattr(config, "use_sliding_window"):
        return None
    return next((name for name in _ATTRIBUTES[key] if hasattr(config, name)), None)


def _is_told(key: str) -> bool:
    """Whether a key says something about the file, or belongs to the tokenizer."""
    place, _, name = key.partition(".")
    if place == "tokenizer":
        plain = name.removeprefix("ggml.")
        told = name.startswith(("chat_template", "huggingface."))
        return told or plain in _TOKENIZER or plain.endswith("_token_id")
    told = place in ("GGUF", "general", "quantize", "imatrix") or key == "split.tensors.count"
    return told and key not in _NEUTRAL


def _rope(
    left: dict[str, Any], model: str, head_dim: int, length: int, factors: NDArray[Any] | None
) -> dict[str, Any]:
    """Take the keys of rotary positions that can be used; return parameters that mean the same."""
    theta, scaling = left.pop("rope.freq_base", 10000.0), "rope.scaling."
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    dims = left.get("rope.dimension_count", head_dim)
    if dims == head_dim or (model == "phi3" and int(head_dim * (dims / head_dim)) == dims):
        left.pop("rope.dimension_count", None)
        rope |= {"partial_rotary_factor": dims / head_dim} if dims < head_dim else {}
    kind = left.get(f"{scaling}type", "linear")
    if kind in ("none", "linear", "yarn"):
        factor = left.pop(f"{scaling}factor", left.pop("rope.scale_linear", 0)) or 1
        original = left.pop(f"{scaling}original_context_length", length)
        fast, slow = (left.pop(f"{scaling}yarn_beta_{end}", None) for end in ("fast", "slow"))
        for name in ("type", "finetuned"):
            left.pop(scaling + name, None)
        if kind != "none" and factor != 1:
            rope |= {"rope_type": kind, "factor": factor}
        if rope["rope_type"] == "yarn":
            betas = {"beta_fast": fast or 32.0, "beta_slow": slow or 1.0}
            rope |= {"original_max_position_embeddings": original, **betas}
    if factors is not None and (factors != 1).any():
        frequencies = theta ** (-np.arange(0, dims, 2) / dims) / (2 * math.pi)
        fits = len(factors) == len(frequencies) and rope["rope_type"] == "default"
        fits = fits and model == "llama" and factors.max() > 1
        found = _llama3(factors.astype(np.float64), frequencies) if fits else None
        if found is None:
            left[FACTORS] = factors
        else:
            rope |= {"rope_type": "llama3", **found}
    if model == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base_swa", 10000.0)}
        return {"full_attention": rope, "sliding_attention": local}
    return rope


def _llama3(given: NDArray[Any], frequencies: NDArray[Any]) -> dict[str, Any] | None:
    """Meta's parameters of `llama3` that divide the frequencies so; the file does not name them."""
    factor = float(given.max())
    for length in (2**power for power in range(4, 24)):
        part = np.clip((length * frequencies - 1) / 3, 0, 1)
        if np.allclose(1 / ((1 - part) / factor + part), given, rtol=1e-5, atol=0):
            ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"factor": factor, **ends, "original_max_position_embeddings": length}
    return None
