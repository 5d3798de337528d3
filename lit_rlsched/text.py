"""Text that can be written to any file."""

from typing import Any


def printable(value: Any) -> Any:
    """Return the value with unpaired surrogates, which UTF-8 cannot encode, escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item) for item in value]
    return value
