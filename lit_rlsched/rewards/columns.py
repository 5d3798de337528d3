"""Whether reward functions can be called with the columns of the data, before anything starts."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from typing import Any

GIVEN = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""What every function is called with besides the columns, as in TRL."""
OFFERED = ("finish_reasons", "log_failure", "reward_timeout")
"""What a function may name to be called with it, too."""
NOT_PASSED = ("prompt", "uid", "completion", "completion_ids")
"""Columns that no function gets."""


def check_columns(
    function: Callable[..., Any], name: str, rows: Sequence[Mapping[str, Any]], data: str
) -> None:
    """Refuse a function that every call would fail of.

    Args:
        function: A reward function. Its attribute `required_columns`, if it has one, names columns
            that it needs beside its arguments.
        name: Of the function.
        rows: Those it will be called for.
        data: What they are called.

    Raises:
        ValueError: the function requires an argument that no column gives, or does not take one
            that it is called with; names function, argument and columns.
    """
    required, taken = arguments(function)
    required += [*getattr(function, "required_columns", ())]
    first: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows):
        first.setdefault(tuple(row), number)
    for row_columns, number in first.items():
        columns = sorted(set(map(str, row_columns)) - {*NOT_PASSED})
        known = {*columns, *GIVEN, *OFFERED}
        if missing := [argument for argument in required if argument not in known]:
            raise ValueError(
                f"The reward function `{name}` requires `{missing[0]}`, and row {number} of "
                f"`{data}` (the first is 0) has no such column. {_hint(missing[0], columns)}"
            )
        if taken is not None and (odd := [a for a in (*GIVEN, *columns) if a not in taken]):
            raise ValueError(
                f"The reward function `{name}` does not take {', '.join(f'`{a}`' for a in odd)}. "
                f"Functions are called as TRL calls them, with {', '.join(GIVEN)} and every column "
                f"of the row, which are {columns} in row {number} of `{data}`. Add `**kwargs` to "
                "its arguments."
            )


def arguments(function: Callable[..., Any]) -> tuple[list[str], set[str] | None]:
    """Arguments without a default, and all that it takes; None: whatever it is given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are written in C do not tell
        return [], None
    named = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, _REST)]
    required = [p.name for p in named if p.default is Parameter.empty]
    anything = any(p.kind is _REST for p in parameters)
    return required, None if anything else {p.name for p in named}


_REST = Parameter.VAR_KEYWORD


def _hint(argument: str, columns: list[str]) -> str:
    near = get_close_matches(argument, [*columns, *GIVEN, *OFFERED], n=1, cutoff=0.7)
    meant = f"Did you mean `{near[0]}`? " if near else ""
    return (
        f"{meant}Its columns are {columns}. Rename the argument or the column, or give the "
        "argument a default."
    )
