"""Words, sizes and secrets in text."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_rlsched.settings import UsageError

if TYPE_CHECKING:
    import torch

REDACTED = "[redacted]"
"""Stands for a secret."""


MOST_LEVELS = 100
"""Most levels of dicts and lists in data that a model, a tool or a reward function writes. What
goes through such data (pickle, JSON, `printable`) takes some of Python's stack for each level."""


def is_deep(value: Any) -> bool:
    """Return whether a value has more than `MOST_LEVELS` levels of dicts and lists."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        dicts = [one.values() for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, (list, tuple))]
        if not dicts and not lists:
            return False
        level = [inner for one in (*dicts, *lists) for inner in one]
    return True


def printable(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Return the value with unpaired surrogates escaped, and `…` for what is below `levels`."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, (dict, list, tuple)) and not levels:
        return "…"
    if isinstance(value, dict):
        return {printable(key, 0): printable(item, levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item, levels - 1) for item in value]
    return value


def content_text(content: Any) -> str:
    """Return the content of a message as text: text parts are joined, other lists are printed."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content) if are_text(content) else str(content)


def are_text(content: Sequence[Any]) -> bool:
    """Return whether the content of a message is a list of text parts."""
    parts = [part for part in content if isinstance(part, dict) and part.keys() == {"type", "text"}]
    kinds = {(part["type"], type(part["text"])) for part in parts}
    return len(parts) == len(content) and kinds == {("text", str)}


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which templates keep a thought."""


def as_text(chat: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a text as it is, and a chat as a transcript in which no text passes for a message."""
    if isinstance(chat, str):
        return chat
    turns = ("\n".join("\n    ".join(part.splitlines()) for part in _parts(m)) for m in chat)
    return str(printable("\n\n".join(turns)))


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the thought, the content and the calls of a message."""
    who = str(message.get("role"))
    if name := message.get("name"):
        who += f" {_plain_name(name)}"
    thoughts = [f"{who} thinks: {message[key]}" for key in THOUGHTS if message.get(key)]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    yield from thoughts
    if (content := content_text(message.get("content") or "")) or not (thoughts or calls):
        yield f"{who}: {content}"
    for call in calls:
        given = call.get("arguments")
        if not isinstance(given, str):
            given = json.dumps({} if given is None else given, ensure_ascii=False, default=str)
        yield f"{who} calls {_plain_name(call.get('name'))}({given})"


def _plain_name(name: Any) -> str:
    """Return the name of a tool, in quotes if it is none: a model may write anything there."""
    return name if re.fullmatch(r"[\w.-]{1,64}", str(name)) else json.dumps(name)


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


_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}IB": 1024**_power, f"{_prefix}B": 1000**_power}


def parse_bytes(size: str | int, setting: str) -> int:
    """Parse a size such as `2GiB`, `512 MB` or a number of bytes."""
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
    """Bytes of key-value cache per token, in all layers of a model with plain attention."""
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
    shown = _ADDRESS.sub(lambda found: _QUERY_VALUE.sub(rf"\1{REDACTED}", found[0]), text)
    return _VALUE.sub(REDACTED, shown)


def without_secrets(settings: Any, name: str = "") -> Any:
    """Return settings without strings under names such as `api_key`, HTTP headers and keys."""
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
