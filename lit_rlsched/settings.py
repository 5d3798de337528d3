"""Numbers of a configuration that are none."""

import math
from collections.abc import Collection, Mapping
from typing import Any


def check_finite(settings: Mapping[str, Any], besides: Collection[str] = ()) -> None:
    """Refuse infinite settings and those that are not a number, in lists and dicts too.

    Args:
        settings: What a constructor was given: its `locals()`.
        besides: Names of what is no setting.

    Raises:
        ValueError: names the setting, its value and what to use instead.
    """
    for name, value in settings.items():
        if name not in besides and not _finite(value):
            raise ValueError(
                f"`{name}={value!r}` must be finite: use a number, or leave `{name}` out for the "
                "default."
            )


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_finite, value))
