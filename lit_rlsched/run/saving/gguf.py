"""A Hugging Face folder from a GGUF file."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
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
        UsageError: there is no such file, transformers cannot read its architecture, the package
            `gguf` is missing, or `out` is not empty.
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
        config = AutoConfig.from_pretrained(path.parent, **how)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **how)
        read = AutoModelForCausalLM.from_pretrained(path.parent, dtype=DTYPES[dtype], **how)
    except Exception as error:  # of numpy, if the file is cut short
        raise UsageError(
            f"`file={file}`: transformers cannot read this GGUF file. Its architecture or its kind "
            f"of quantisation may be unknown to it, or the file is cut short. ({error})"
        ) from error
    with torch.device("meta"):  # `read` counts as quantised, and would not be saved
        shell = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    shell.generation_config = read.generation_config
    if (longest := getattr(config, "max_position_embeddings", None)) is not None:
        tokenizer.model_max_length = longest
    with written_at_once(folder) as new:
        write_model(shell, read.state_dict(), DTYPES[dtype], new)
        tokenizer.save_pretrained(new)
    return folder
