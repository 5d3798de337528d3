"""Checks of reward functions and of the reward scheduler's settings before anything starts."""

import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from itertools import count
from typing import Any

from lit_rlsched.processes import worker_environment
from lit_rlsched.settings import UsageError, did_you_mean
from lit_rlsched.text import parse_bytes
from lit_rlsched.workers.child import unwrap

MIN_MEMORY = 64 << 20
"""Bytes that a worker needs for the rows it receives."""
GIVEN = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""Arguments with which every function is called besides the columns, as in TRL."""
OFFERED = ("finish_reasons", "log_failure", "reward_timeout")
"""Arguments that TRL does not have; only functions that accept them are called with them."""
NOT_PASSED = ("prompt", "uid", "completion")
"""Columns that no function is called with: TRL passes neither the first nor the last."""


def check_env_vars(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse environment variables that are not set."""
    if isinstance(names, str):
        raise UsageError(f"`reward_env_vars={names!r}`: give a list of names, such as `[{names}]`.")
    if missing := sorted(set(names) - os.environ.keys()):
        raise UsageError(
            f"`reward_env_vars={list(names)}`: the trainer's environment does not have "
            f"{', '.join(missing)}. Set every variable that is listed, or leave it out."
        )
    return tuple(names)


def check_memory_limit(limit: str | int | None) -> int | None:
    """Return the limit in bytes."""
    if limit is None:
        return None
    size = parse_bytes(limit, "memory_limit")
    if size < MIN_MEMORY:
        raise UsageError(f"`memory_limit={limit!r}`: use '64MiB' or more.")
    return size


def as_functions(given: object) -> list[Callable[..., Any]]:
    """Return reward functions as a list."""
    if not given:
        raise UsageError("`reward_funcs` is empty. Give at least one reward function.")
    several = list(given) if isinstance(given, list | tuple) else [given]
    more = " Reward models of the Hub are not run: wrap yours in a function that returns scores."
    functions = [imported(one, "reward_funcs", "my_rewards.score", more) for one in several]
    for index, function in enumerate(functions):
        if not callable(function):
            raise UsageError(
                f"`reward_funcs[{index}]={function!r}` is not callable. Give a function, or in a "
                "config the import path of one."
            )
        if any(kind.__module__.startswith("torch.nn.") for kind in type(function).__mro__):
            raise UsageError(
                f"`reward_funcs[{index}]` is a torch module ({type(function).__name__}). Reward "
                "models are not run by the scheduler: wrap yours in a function that returns a list "
                "of scores."
            )
        environment_of(function)  # may refuse it
    return functions


def imported(given: Any, setting: str, such: str, more: str = "") -> Any:
    """Return what an import path names; anything but text is returned as it is."""
    if not isinstance(given, str):
        return given
    try:
        return pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"`{setting}={given}`: {error}. Give it itself or its import path, such as `{such}`."
            f"{more}"
        ) from None


def environment_of(function: Any) -> tuple[str, ...]:
    """Return the attribute `env_vars`: environment variables that only this function may see."""
    names = getattr(function, "env_vars", None)
    if names is None:
        names = getattr(unwrap(function), "env_vars", None) or ()
    if not isinstance(names, tuple | list | set | frozenset) or not all(
        isinstance(name, str) for name in names
    ):
        raise UsageError(
            f"The reward function {unwrap(function)!r} has the attribute `env_vars={names!r}`. "
            "Make it a tuple of names of environment variables, or give it another name."
        )
    return tuple(names)


def check_seen_by_tools(name: str, own: Iterable[str], shared: Iterable[str]) -> None:
    """Refuse `env_vars` of a function that is called with environments, where tools run too."""
    seen = worker_environment(shared)
    if secret := [variable for variable in own if variable in os.environ and variable not in seen]:
        raise UsageError(
            f"`{name}` has `env_vars={secret}`, which no other function may see, and an argument "
            "`environments`: it is called in the process that holds them, where tools run. Name "
            "the variables in `reward_env_vars`, if tools and other reward functions may see them; "
            "or use them in a reward function without that argument."
        )


def unique_names(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Return TRL's names: `__name__` or the class; a repeated name gets `_2`, `_3` and so on."""
    names: list[str] = []
    for function in map(unwrap, functions):
        base = name = str(getattr(function, "__name__", type(function).__name__))
        numbers = count(2)
        while name in names:
            name = f"{base}_{next(numbers)}"
        names.append(name)
    return names


def offered_arguments(function: Callable[..., Any]) -> set[str]:
    """Return which of the `OFFERED` arguments the function is called with.

    `finish_reasons` is also passed to a function with `**kwargs`; the others must be named.
    """
    parameters = parameters_of(function)
    offered = parameters.keys() & {*OFFERED}
    return offered | {"finish_reasons"} if _takes_anything(parameters) else offered


def check_columns(
    function: Callable[..., Any], name: str, row_columns: Sequence[str], at: str
) -> None:
    """Refuse a function that cannot be called with the columns of a row, or would not see one."""
    if hidden := [given for given in (*GIVEN, *OFFERED) if given in row_columns]:
        raise UsageError(
            f"The column {', '.join(f'`{given}`' for given in hidden)} of {at} would not reach any "
            "reward function: arguments of that name hold something else. Rename it."
        )
    parameters = parameters_of(function)
    anything = _takes_anything(parameters)
    required = [
        *(p.name for p in parameters.values() if p.default is p.empty and p.kind not in _VARIADIC),
        *getattr(function, "required_columns", ()),
    ]
    columns = sorted({*row_columns} - {*NOT_PASSED})
    known = [*columns, *GIVEN, *OFFERED]
    for argument in required:
        if argument not in known:
            raise UsageError(
                f"The reward function `{name}` requires `{argument}`, and {at} has no such "
                f"column{' that is passed' if argument in row_columns else ''}."
                f"{did_you_mean(argument, known)} Its columns are {columns}. "
                "Rename the argument or the column, or give the argument a default."
            )
    if odd := [a for a in (*GIVEN, *columns) if not anything and a not in parameters]:
        raise UsageError(
            f"The reward function `{name}` does not take {', '.join(f'`{a}`' for a in odd)}. "
            f"Functions are called as TRL calls them, with {', '.join(GIVEN)} and every column "
            f"of the row, which are {columns} in {at}. Add `**kwargs` to its arguments."
        )


TAGS = re.compile("think|answer|reason|solution", re.I)
"""Words in the names of tokens that rewards look for."""


def code_of(function: Callable[..., Any]) -> str:
    """Return a function's source, in which a token stands that it looks for; empty if unknown."""
    function = unwrap(function)
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Return a function's parameters; an unknown signature, as in C, counts as `**kwargs`."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {"kwargs": Parameter("kwargs", Parameter.VAR_KEYWORD)}


def _takes_anything(parameters: Mapping[str, Parameter]) -> bool:
    return any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
