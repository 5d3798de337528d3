"""Random models with the shape of real ones, for machines without network.

    python -m benchmarks run shapes 7B --out runs/shapes/7B

writes `config.json` and the tokenizer of the quick task, which is all that `lit-rlsched estimate`
needs; `--weights` adds random weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.gpu_check.setting import QUICK_TASK, Setting
from benchmarks.models import make_model

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3"}
_QWEN3 |= {"max_position_embeddings": 40960, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {  # Qwen3-0.6B
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7B": {  # Qwen3-1.7B
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {  # Qwen3-4B
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "7B": {  # Qwen2.5-7B
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "tiny": {  # for a CPU, in place of the others
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}

LOGITS = 0.64
"""Standard deviation of the logits of random weights. It is that of Qwen3-0.6B with transformers'
default of 0.02. With 1.6, rounding alone changes log-probs by 0.08 (mean; autocast against bf16
throughout; 28 layers of hidden size 256, 512 tokens, seed 0, on a CPU), above the limit of 0.05.
With this value rounding changes them by 0.01, and another input by 0.7."""


def shape_model(setting: Setting, shape: str) -> str:
    """Return the folder of a random model of this shape; make it if it does not exist.

    On a CPU it always has the tiny shape. `--model` replaces the 0.6B shape.
    """
    if shape == "0.6B" and setting.model is not None:
        return setting.model
    shape = setting.pick(shape, "tiny")
    folder = Path(setting.models, shape)
    made, sizes = folder / "made_by.json", json.dumps(SHAPES[shape])
    if not made.exists() or made.read_text() != sizes:
        write_shape(folder, shape, setting.device)
        made.write_text(sizes)
    return str(folder)


def write_shape(folder: Path, shape: str, weights_on: str | None = None) -> None:
    """Write configuration and tokenizer, and bf16 weights if a device is named."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QUICK_TASK)
    sizes = dict(SHAPES[shape])
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    ends = {name: getattr(tokenizer, name) for name in special}
    sizes["initializer_range"] = LOGITS / sizes["hidden_size"] ** 0.5
    if weights_on is not None:
        make_model(folder, dtype="bfloat16", device=weights_on, **sizes, **ends)
    else:
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, **ends)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a model."""
    parser = results.parser("shapes", __doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument(
        "--weights",
        metavar="DEVICE",
        help="device on which to make random weights, which are saved, too",
    )
    options = results.parse(parser, arguments)
    write_shape(Path(options.out), options.shape, options.weights)


if __name__ == "__main__":
    main()
