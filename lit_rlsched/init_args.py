"""Constructors that explain a wrong argument and remember the right ones, for loggers."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from lit_rlsched.trl_names import suggestion

MAX_ENTRIES = 100
"""Longer lists are shown by their length."""


class _ConstructorSignature:
    """Is the signature of `__init__` for `inspect`, which would take that of `__new__`."""

    def __get__(self, instance: object, cls: type) -> inspect.Signature:
        if instance is not None:  # a module has another signature as a function
            raise AttributeError("__signature__")
        if cls.__init__ is object.__init__:  # type: ignore[misc]
            return inspect.Signature()
        found = inspect.signature(cls.__init__)  # type: ignore[misc]
        return found.replace(parameters=[*found.parameters.values()][1:])


class KnownArguments:
    """Base class of modules, data modules and whatever else is configured: names a wrong argument.

    `__new__` and not a wrapper of `__init__`: Lightning's `save_hyperparameters` looks for the
    constructor's frame.

    Raises:
        TypeError: an argument does not exist; says which one was meant, or what TRL's is here.
    """

    __signature__ = _ConstructorSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        known, open_ended = constructor_arguments(cls)
        if not open_ended:
            for name in (name for name in kwargs if name not in known):
                raise TypeError(
                    f"`{cls.__name__}({name}=...)`: there is no such argument."
                    + suggestion(name, known, functools.partial(_written, cls.__name__, known))
                )
            if args and not known:  # `object` lets them pass where there is a `__new__`
                raise TypeError(f"`{cls.__name__}()` takes no arguments.")
        return super().__new__(cls)


_OWNERS = {"model": "GRPOModule", "data": "RolloutDataModule", "trainer": "Trainer"}


def _written(owner: str, known: set[str], setting: str) -> str:
    """Return how Python writes a setting such as `data.train_data`, next to those of `owner`."""
    home, _, name = setting.rpartition(".")
    home = _OWNERS.get(home, home)
    return f"`{name}`" if name in known or not home else f"`{home}({name}=...)`"


def constructor_arguments(cls: type) -> tuple[set[str], bool]:
    """Return the arguments of a class and of those that it passes `**kwargs` to.

    Returns:
        The names, and whether a class outside this package may take others from `**kwargs`.
    """
    known: set[str] = set()
    for owner in cls.__mro__:
        if (init := vars(owner).get("__init__")) is None or owner is object:
            continue
        _, *parameters = inspect.signature(init).parameters.values()
        kinds = {parameter.name: parameter.kind for parameter in parameters}
        known |= {n for n, kind in kinds.items() if kind not in _VARIADIC}
        if inspect.Parameter.VAR_KEYWORD not in kinds.values():
            return known, False
        if owner.__module__.partition(".")[0] != __package__:
            return known, True
    return known, False


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class RemembersInit(KnownArguments):
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
