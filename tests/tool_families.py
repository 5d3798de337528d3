"""Chat templates with tools, as TRL has them, on a tokenizer of bytes."""

from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
END = {
    "qwen": "<|im_end|>",
    "nemotron": "<|im_end|>",
    "llama": "<|eot_id|>",
    "gemma4": "<|tool_response>",
    "glm": "<|observation|>",
}


def tokenizer_of(name):
    """A byte tokenizer with the template and the end token of a family."""
    end = next(end for family, end in END.items() if name.startswith(family))
    return byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), end)


def byte_tokenizer(chat_template, end):
    """A byte tokenizer with a chat template and its end token."""
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|turn>", "<turn|>", "<|tool_response>"]
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special, *headers])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, chat_template=chat_template
    )


def small_model(tokenizer):
    """A random model for such a tokenizer."""
    config = Qwen3Config(
        vocab_size=288,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def of_family(name, table):
    return table[max((f for f in table if name.startswith(f)), key=len)]
