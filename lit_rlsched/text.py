"""Words, sizes and secrets in text."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_rlsched.settings import UsageError

if TYPE_CHECKING:
    import torch

REDACTED = "[redacted]"
"""Stands for a secret."""


def printable(value: Any) -> Any:
    """Return the value with unpaired surrogates, which UTF-8 cannot encode, escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item) for item in value]
    return value


def as_text(chat: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a text as it is, and a chat with a line for each message and its calls."""
    if isinstance(chat, str):
        return chat
    lines = []
    for message in chat:
        functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
        calls = [f"{f.get('name')}({json.dumps(f.get('arguments'))})" for f in functions]
        content = message.get("content") or ""
        lines.append(f"{message.get('role')}: {' '.join(filter(None, [content, *calls]))}")
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 slot`, `5 slots`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share such as `3 %`."""
    return f"{share:.0%}".replace("%", " %")


def three_digits(value: float) -> str:
    """Return a number with at least three digits, without an exponent: `0.123`, `12.3`, `1,234`."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration such as `3.2 s`, `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60 - 0.5)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


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
        UsageError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper(), 0) if match else 0
    if not match or float(match[1]) * unit < 1:
        raise UsageError(f"`{setting}={size!r}`: expected a size such as '2GiB' or '512MB'.")
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
        UsageError: the model has no attention.
    """
    text = config.get_text_config()
    if not (heads := getattr(text, "num_attention_heads", None)):
        raise UsageError(
            f"`model`: a {text.model_type!r} model has recurrent layers alone, and engines and "
            "their slots are sized by a key-value cache, which it has not. Train a model with "
            "attention."
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * text.num_hidden_layers * kv_heads(text) * head_dim * dtype.itemsize


def kv_heads(text: Any) -> int:
    """Number of heads that have keys and values, from the config of a language model."""
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


_NAME = re.compile(r"(?i)(key|token|secret|password|passwd|credentials?|authorization)$")
_HEADERS = {"extra_headers", "extra_query", "default_headers", "headers"}
_VALUE = re.compile(
    r"(?<=://)[^/@\s]+(?=@)|(?i:\b(?:bearer|basic)\s+\S+)"
    r"|\b(?:sk|gsk|xai)-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}"
)
"""User and password of an address, credentials of HTTP, and keys known by their prefix."""
_ADDRESS = re.compile(r"(?<=://)[^\s\"'`)]+")
_QUERY_VALUE = re.compile(r"([?&#](?:[^=&#]+=)?)[^&#]+")


def hide_keys(text: str) -> str:
    """Return a text without what looks like a key, nor what the query of an address holds."""
    shown = _VALUE.sub(REDACTED, text)
    return _ADDRESS.sub(lambda found: _QUERY_VALUE.sub(rf"\1{REDACTED}", found[0]), shown)


def without_secrets(settings: Any, name: str = "") -> Any:
    """Return settings without secrets.

    Removed are strings under names such as `api_key` and `hf_token`, values of HTTP headers, values
    of environment variables with such names, and what `hide_keys` hides.

    Args:
        settings: Nested dicts and lists of plain values.
        name: Name of the setting whose value this is.
    """
    if isinstance(settings, Mapping):
        hidden = name in _HEADERS
        return {k: REDACTED if hidden else without_secrets(v, k) for k, v in settings.items()}
    if isinstance(settings, list | tuple):
        return type(settings)(without_secrets(entry, name) for entry in settings)
    if not isinstance(settings, str):
        return settings
    if _NAME.search(name):
        return REDACTED
    for variable, secret in os.environ.items():
        if _NAME.search(variable) and len(secret) >= 8:
            settings = settings.replace(secret, REDACTED)
    return hide_keys(settings)
