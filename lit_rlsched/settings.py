"""Checks of single settings, for messages that are alike."""

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


def check_count(owner: str, name: str, value: object, least: int, why: str = "") -> None:
    """Refuse what is no whole number, or less than `least`.

    Args:
        owner: Class that the setting belongs to.
        name: Of the setting.
        value: What was given.
        least: That works.
        why: A sentence more, or what to do instead.

    Raises:
        ValueError: names the setting, its value and what to use instead.
    """
    if type(value) is not int or value < least:
        raise ValueError(
            f"`{owner}({name}={value!r})`: must be a whole number, {least} or more.{why and ' '}"
            f"{why}"
        )


def check_choice(owner: str, name: str, value: object, choices: Collection[str]) -> None:
    """Refuse what is none of the choices.

    Args:
        owner: Class that the setting belongs to.
        name: Of the setting.
        value: What was given.
        choices: What works.

    Raises:
        ValueError: names the setting, its value and the choices.
    """
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"`{owner}({name}={value!r})` is unknown. Use one of {known}.")


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_finite, value))
