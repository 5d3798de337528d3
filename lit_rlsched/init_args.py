"""Objects that remember the arguments of their constructor, so that loggers can show them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

MAX_ENTRIES = 100
"""Longer lists are shown by their length."""


class RemembersInit:
    """Base class of callbacks, engines, predictors and tasks, whose arguments are settings.

    `init_args` has every argument of the constructor, defaults included, as `plain` values.
    """

    init_args: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)  # type: ignore[method-assign]


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)  # last set by the class of the object itself
        given.apply_defaults()
        self.init_args = {n: plain(v) for n, v in [*given.arguments.items()][1:]}

    return __init__


def plain(value: Any) -> Any:
    """Return a value as numbers, strings, lists and dicts, which every logger can write."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        many = len(value) > MAX_ENTRIES
        return f"{len(value)} entries" if many else [plain(entry) for entry in value]
    if isinstance(value, PurePath):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return {"class": type(value).__qualname__, **getattr(value, "init_args", {})}
