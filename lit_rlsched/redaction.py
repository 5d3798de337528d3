"""Removal of secrets from settings that loggers write or upload."""

import os
import re
from collections.abc import Mapping
from typing import Any

from lit_rlsched.rewards.quoting import REDACTED

_NAME = re.compile(r"(?i)(key|token|secret|password|passwd|credentials?|authorization)$")
_HEADERS = {"extra_headers", "extra_query", "default_headers", "headers"}
_VALUE = re.compile(
    r"(?<=://)[^/@\s]+(?=@)|(?i:\b(?:bearer|basic)\s+\S+)"
    r"|\b(?:sk|gsk|xai)-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}"
)
"""User and password of an address, credentials of HTTP, and keys known by their prefix."""


def without_secrets(settings: Any, name: str = "") -> Any:
    """Return settings without secrets.

    Removed are strings under names such as `api_key` and `hf_token`, values of HTTP headers, values
    of environment variables with such names, and strings that look like a key.

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
    return _VALUE.sub(REDACTED, settings)
