"""Checks of single settings; each raises a `ValueError` with the setting, its value and a fix."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


def check_finite(settings: Mapping[str, Any], besides: Collection[str] = ()) -> None:
    """Refuse NaN and infinity, also in lists and dicts.

    Args:
        settings: The `locals()` of a constructor.
        besides: Names of arguments to skip.
    """
    for name, value in settings.items():
        if name not in besides and not _finite(value):
            raise ValueError(
                f"`{name}={value!r}` must be finite: use a number, or leave `{name}` out for the "
                "default."
            )


def check_count(owner: str, name: str, value: object, least: int, why: str = "") -> None:
    """Refuse a value that is not a whole number of at least `least`.

    Args:
        owner: Class with the setting.
        name: Name of the setting.
        value: Its value.
        least: The smallest value allowed.
        why: One more sentence for the message: a reason or an alternative.
    """
    if type(value) is not int or value < least:
        message = f"`{owner}({name}={value!r})`: must be a whole number, {least} or more. {why}"
        raise ValueError(message.rstrip())


def check_range(owner: str, name: str, value: object, inside: bool, allowed: str) -> None:
    """Refuse a value that is not `inside` the range that `allowed` says in words."""
    if not inside:
        raise ValueError(f"`{owner}({name}={value!r})`: use {allowed}.")


def check_choice(owner: str, name: str, value: object, choices: Collection[str]) -> None:
    """Refuse a value that is not one of `choices`; for `owner` and `name` see `check_count`."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"`{owner}({name}={value!r})` is unknown. Use one of {known}.")


def check_name(owner: str, name: str, value: object, why: str) -> None:
    """Refuse an object in place of a name; for `owner` and `name` see `check_count`."""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"`{owner}({name}=...)` is a `{kind}` object: give a string. {why}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest of the known names; empty if none is near."""
    near = get_close_matches(name, sorted(set(known)), n=1, cutoff=0.7)
    return f" Did you mean `{near[0]}`?" if near else ""


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_finite, value))


_NOT_FOR_TEMPLATES = (
    *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Arguments of `apply_chat_template` that change what is done with its text."""
ENDS = ("add_generation_prompt", "continue_final_message")
"""Arguments of `apply_chat_template` that decide how a prompt ends."""


def check_template_kwargs(given: Mapping[str, Any], besides: Sequence[str] = ()) -> None:
    """Refuse `chat_template_kwargs` that are not for a chat template, or contradict each other.

    Args:
        given: The arguments.
        besides: Others that are refused.

    Raises:
        ValueError: names the argument.
    """
    if wrong := [name for name in (*_NOT_FOR_TEMPLATES, *besides) if name in given]:
        raise ValueError(
            f"`chat_template_kwargs` has `{wrong[0]}`, which is set already: prompts become token "
            "ids, which are neither cut nor padded. Leave it out."
        )
    if all(map(given.get, ENDS)):
        raise ValueError(
            f"`chat_template_kwargs` has {' and '.join(f'`{name}`' for name in ENDS)}: either the "
            "last message is continued, or a new one begins. Leave one of them out. Without both, "
            "a last message of the assistant is continued."
        )
