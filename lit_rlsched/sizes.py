"""Sizes in bytes, from and to text."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PREFIXES = "KMGT"
_UNITS = (
    {"": 1, "B": 1}
    | {f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)}
)


def parse_bytes(size: str | int, setting: str) -> int:
    """Parse a size such as `2GiB`, `512 MB` or a number of bytes.

    Args:
        size: The size.
        setting: Name of the setting, for the error.

    Raises:
        ValueError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper(), 0) if match else 0
    if not match or float(match[1]) * unit < 1:
        raise ValueError(f"`{setting}={size!r}`: expected a size such as '2GiB' or '512MB'.")
    return int(float(match[1]) * unit)


def format_bytes(count: int) -> str:
    """Format a number of bytes such as `1.72 GiB`; 0 is `-`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B" if count else "-"


def kv_bytes_per_token(config: Any, dtype: "torch.dtype") -> int:
    """Bytes of key-value cache per token, in all layers of a model with plain attention.

    Raises:
        ValueError: the model has no attention.
    """
    text = config.get_text_config()
    if not (heads := getattr(text, "num_attention_heads", None)):
        raise ValueError(
            f"`model`: a {text.model_type!r} model has recurrent layers alone, and engines and "
            "their slots are sized by a key-value cache, which it has not. Train a model with "
            "attention."
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * text.num_hidden_layers * kv_heads(text) * head_dim * dtype.itemsize


def kv_heads(text: Any) -> int:
    """Number of heads that have keys and values, from the config of a language model."""
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
