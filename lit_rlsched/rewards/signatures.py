"""What can be told of a reward function before it is called."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def check_reward_function(index: int, function: object) -> None:
    """Refuse what TRL would load or run as a reward model."""
    if not callable(function):
        raise ValueError(
            f"`reward_funcs[{index}]={function!r}` is not callable. Give a function, or in a "
            "config the import path of one."
        )
    if any(kind.__module__.startswith("torch.nn.") for kind in type(function).__mro__):
        raise ValueError(
            f"`reward_funcs[{index}]` is a torch module ({type(function).__name__}). Reward models "
            "are not run by the scheduler: wrap yours in a function that returns a list of scores."
        )
    environment_of(function)


def environment_of(function: Any) -> tuple[str, ...]:
    """Environment variables it needs and other functions are not to see: its attribute `env_vars`.

    Raises:
        ValueError: the attribute is no list of names.
    """
    names = getattr(function, "env_vars", None)
    if names is None and unwrap(function) is not function:
        names = getattr(unwrap(function), "env_vars", None)
    names = () if names is None else names
    if not isinstance(names, tuple | list | set | frozenset) or not all(
        isinstance(name, str) for name in names
    ):
        raise ValueError(
            f"The reward function {unwrap(function)!r} has the attribute `env_vars={names!r}`. "
            "Make it a tuple of names of environment variables, or give it another name."
        )
    return tuple(names)


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine: an `async def`, or an object with such a call."""
    function = unwrap(function)
    return asyncio.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def names_failures(function: Callable[..., Any]) -> bool:
    """Whether it tells why it gives no score: it names the keyword `log_failure`."""
    with contextlib.suppress(TypeError, ValueError):
        return "log_failure" in inspect.signature(function).parameters
    return False


def unique_names(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """TRL's names: `__name__`, or the class of an object; a second one of a name gets `_2`."""
    names: list[str] = []
    for function in map(unwrap, functions):
        base = name = str(getattr(function, "__name__", type(function).__name__))
        number = 2
        while name in names:
            name = f"{base}_{number}"
            number += 1
        names.append(name)
    return names
