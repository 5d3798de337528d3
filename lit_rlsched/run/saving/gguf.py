"""A Hugging Face folder from a GGUF file."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_gguf_available

from lit_rlsched.run.saving.export import DTYPES, new_folder, write_model, written_at_once
from lit_rlsched.run.saving.gguf_config import FACTORS, config_of
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
        raise UsageError(
            f"`file={file}`: transformers cannot read this GGUF file so that the folder computes "
            f"what the file does. {_why(error)}"
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


def _why(error: Exception) -> str:
    if isinstance(error, UsageError):
        return f"{error} Train from the files of which the GGUF file was made."
    return f"Its kind of quantisation may be unknown, or the file is cut short. ({error})"


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
