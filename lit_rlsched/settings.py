"""Checks of single settings, the error for what a user can mend, and remembered arguments."""

import csv
import functools
import inspect
import itertools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


class UsageError(ValueError):
    """Something that the user can mend: the message names it, its value and what to do.

    The command line prints the message alone. Any other exception is a bug and keeps its traceback.
    """


class RunFailed(UsageError, RuntimeError):
    """An engine, a reward worker or another part failed, and the message says what to do."""


def check_finite(settings: Mapping[str, Any]) -> None:
    """Refuse NaN and infinity in settings whose entries `ranges.csv` does not know."""

    def finite(value: Any) -> bool:
        if isinstance(value, Mapping):
            return all(map(finite, value.values()))
        if isinstance(value, list | tuple):
            return all(map(finite, value))
        return not isinstance(value, float) or math.isfinite(value)

    for name in (name for name, value in settings.items() if not finite(value)):
        raise UsageError(
            f"`{name}={settings[name]!r}` must be finite: use a number, or leave `{name}` out for "
            "the default."
        )


SMALLEST, LARGEST, MOST = 1e-12, 1e12, 2**31 - 1
"""Least and largest size of a number that is not 0, and the largest whole number: float32 has them,
and sums of several, too."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may be."""

    least: float
    most: float
    open: tuple[bool, bool]
    """Whether `least` and `most` are outside."""
    whole: bool
    optional: bool
    """Whether it may be `None`."""
    why: str

    @classmethod
    def read(cls, text: str, why: str) -> "Range":
        """Read a range as in `ranges.csv`: `[0;1)`, `(0;)`, whole numbers `1..8`, `1..?`, `any`."""
        optional, text = text.endswith("?"), text.removesuffix("?")
        if text == "any":
            return cls(-math.inf, math.inf, (False, False), True, optional, why)
        if ".." in text:
            low, _, high = text.partition("..")
            return cls(int(low), int(high or MOST), (False, False), True, optional, why)
        low, _, high = text[1:-1].partition(";")
        ends = text[0] == "(" and bool(low), text[-1] == ")" and bool(high)
        return cls(float(low or -LARGEST), float(high or LARGEST), ends, False, optional, why)

    def holds(self, value: Any) -> bool:
        """Whether a value, or each entry of a list or dict, is in the range."""
        if value is None:
            return self.optional
        if hasattr(value, "tolist"):  # of NumPy or torch
            value = value.tolist()
        if isinstance(value, Mapping | list | tuple | Set):
            return all(map(self.holds, value.values() if isinstance(value, Mapping) else value))
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        if value in (self.least, self.most) and self.open[value == self.most]:
            return False
        number: Any = value
        inside = self.least <= number <= self.most
        return bool(inside and (self.whole or not _too_small_or_large(number)))

    def __str__(self) -> str:
        """What to do, in words."""
        if self.whole:
            least = f", {self.least} or more" if self.least > -math.inf else ""
            most = f" and at most {self.most:,}" if self.most < MOST else ""
            return f"must be a whole number{least}{most}"
        ends = self.least, self.most
        least, most = (f"{n:,.0f}" if 1000 <= n < 1e10 else f"{n:g}" for n in ends)
        if self.most == LARGEST:
            if self.least == -LARGEST:
                return f"use a number from {self.least:g} to {self.most:g}"
            return f"use more than {least}" if self.open[0] else f"use {least} or more"
        if self.open[0]:
            return f"use more than {least}, {'less than' if self.open[1] else 'at most'} {most}"
        return f"use {least}{' or more and less than' if self.open[1] else ' to'} {most}"


def _too_small_or_large(number: Any) -> bool:
    return bool(0 < abs(number) < SMALLEST or LARGEST < abs(number) < math.inf)


def _csv_rows(name: str) -> list[list[str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return [*csv.reader(file)][1:]


@functools.cache
def ranges() -> dict[str, dict[str, Range]]:
    """The range of each number that a class or command of ours takes, by owner and name."""
    found: dict[str, dict[str, Range]] = {}
    for owner, name, text, why in _csv_rows("ranges.csv"):
        found.setdefault(owner, {})[name] = Range.read(text, why)
    return found


def check_ranges(owner: str, given: Mapping[str, Any], named: str | None = None) -> None:
    """Refuse numbers outside of the ranges of `ranges.csv`."""
    for name, allowed in ranges().get(owner, {}).items():
        value: Any = given.get(name)
        if name not in given or allowed.holds(value):
            continue
        size = ""
        if isinstance(value, int) and allowed.whole and value > MOST:
            size = f" and at most {MOST:,}"
        elif isinstance(value, Real) and _too_small_or_large(value):
            size = f", of a size from {SMALLEST:g} to {LARGEST:g}"
        message = f"`{named or owner}({name}={value!r})`: {allowed}{size}. {allowed.why}"
        raise UsageError(message.rstrip())


def check_choice(owner: str, name: str, value: object, choices: Collection[str]) -> None:
    """Refuse a value that is not one of `choices` for the setting `name` of the class `owner`."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise UsageError(f"`{owner}({name}={value!r})` is unknown. Use one of {known}.")


@contextmanager
def arguments_checked(
    owner: str, classes: Sequence[type], given: Mapping[str, Any]
) -> Iterator[None]:
    """Refuse arguments out of their range, of another type than their annotation, or no choice.

    What the block refuses itself comes before the types, since it knows the reason.
    """
    parameters = [p for c in classes for p in inspect.signature(c.__init__).parameters.values()]  # type: ignore[misc]
    for cls in classes:
        if cls.__module__.partition(".")[0] == __package__:
            check_ranges(cls.__name__, given, owner)
    try:
        yield
    except UsageError:
        raise
    except Exception:
        _check_types(owner, parameters, given)
        raise
    _check_types(owner, parameters, given)


def _check_types(
    owner: str, parameters: Iterable[inspect.Parameter], given: Mapping[str, Any]
) -> None:
    for parameter in parameters:
        name, hint = parameter.name, parameter.annotation
        if name not in given or parameter.kind in _VARIADIC:
            continue
        if (value := given[name]) is parameter.default or _fits(value, hint):
            continue
        kinds = _either(hint)
        if isinstance(value, str) and any(get_origin(of) is Literal for of in kinds):
            few: dict[Any, tuple[Any, ...]] = {type(None): (None,), bool: (False, True)}
            words = (get_args(of) if get_origin(of) is Literal else few.get(of, ()) for of in kinds)
            check_choice(owner, name, value, [*itertools.chain(*words)])
        said = " or ".join(dict.fromkeys(map(_said, kinds)))
        raise UsageError(f"`{owner}({name}={value!r})`: use {said}.")


def _either(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str | PurePath, "a string"),
    list: (Sequence | Set, "a list"),
    dict: (Mapping | Namespace, "a dict"),
    type(None): (type(None), "None"),
}
"""What is accepted for a type, and its words."""
_TYPES |= {Sequence: _TYPES[list], tuple: _TYPES[list], Mapping: _TYPES[dict]}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type, and its entries are of theirs."""
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    if len(either := _either(hint)) > 1:
        return any(_fits(value, of) for of in either)
    kind, of = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return value in of
    if kind not in _TYPES:
        return True
    if not isinstance(value, _TYPES[kind][0]):
        return False
    if isinstance(value, bool | str):
        return kind in (bool, str)
    entries: Any = value
    if not of or isinstance(value, Namespace):
        return True
    if kind is tuple and ... not in of:
        return len(entries) == len(of) and all(map(_fits, entries, of))
    each = of[0] if kind is tuple else of[-1]
    return all(_fits(v, each) for v in (entries.values() if kind in (dict, Mapping) else entries))


def _said(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    kind, of = get_origin(hint) or hint, get_args(hint)
    if kind not in _TYPES:
        return f"a `{getattr(kind, '__name__', kind)}`"
    entries: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "strings"}
    return _TYPES[kind][1] + (f" of {entries[of[-1]]}" if of and of[-1] in entries else "")


def check_name(owner: str, name: str, value: object, why: str) -> None:
    """Refuse an object in place of a name; for `owner` and `name` see `check_choice`."""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UsageError(f"`{owner}({name}=...)` is a `{kind}` object: give a string. {why}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest of the known names; empty if none is near."""
    near = get_close_matches(name, sorted(set(known)), n=1, cutoff=0.65)
    return f" Did you mean `{near[0]}`?" if near else ""


_NOT_FOR_TEMPLATES = (
    *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Arguments of `apply_chat_template` that change what is done with its text."""
ENDS = ("add_generation_prompt", "continue_final_message")
"""Arguments of `apply_chat_template` that decide how a prompt ends."""


def check_template_kwargs(given: Mapping[str, Any]) -> None:
    """Refuse `chat_template_kwargs` that are not for a chat template, or contradict each other."""
    if wrong := [name for name in _NOT_FOR_TEMPLATES if name in given]:
        raise UsageError(
            f"`chat_template_kwargs` has `{wrong[0]}`, which is set already: prompts become token "
            "ids, which are neither cut nor padded. Leave it out."
        )
    if all(map(given.get, ENDS)):
        raise UsageError(
            f"`chat_template_kwargs` has {' and '.join(f'`{name}`' for name in ENDS)}: either the "
            "last message is continued, or a new one begins. Leave one of them out. Without both, "
            "a last message of the assistant is continued."
        )


@functools.cache
def trl_names() -> dict[str, list[list[str]]]:
    """TRL's names, ours (empty: no counterpart) and a remark, by the headings of the page."""
    rows: dict[str, list[list[str]]] = {}
    for heading, *row in _csv_rows("trl_names.csv"):
        rows.setdefault(heading, []).append(row)
    return rows


def counterpart(name: str, written: Callable[[str], str]) -> str:
    """Return a sentence about the setting that TRL calls `name`; empty if it has none."""
    rows = (row for rows in trl_names().values() for row in rows)
    row = next((row for row in rows if name in row[0].split(", ")), None)
    if row is None:
        return ""
    ours, remark = row[1].split(", ") if row[1] else [], row[2]
    if len(both := [one for one in ours if one.endswith(f".{name}")]) == 1:
        ours = both
    remark = re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)", "", remark)  # links of the page
    remark = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", remark)
    if not ours:
        return f" TRL's `{name}` has no counterpart here: {remark}."
    said = f" TRL's `{name}` is {', '.join(map(written, ours))} here"
    return f"{said}: {remark}." if remark else f"{said}."


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
        UsageError: an argument does not exist; says which one was meant, or what TRL's is here.
    """

    __signature__ = _ConstructorSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        known, open_ended = constructor_arguments(cls)
        if not open_ended:
            for name in (name for name in kwargs if name not in known):
                near = counterpart(name, functools.partial(_written, known))
                raise UsageError(
                    f"`{cls.__name__}({name}=...)`: there is no such argument."
                    f"{near or did_you_mean(name, known)}"
                )
            if args and not known:  # `object` lets them pass where there is a `__new__`
                raise UsageError(f"`{cls.__name__}()` takes no arguments.")
        return super().__new__(cls)


_OWNERS = {"model": "GRPOModule", "data": "RolloutDataModule", "trainer": "Trainer"}


def _written(known: set[str], setting: str) -> str:
    """Return how Python writes a setting such as `data.train_data`, next to `known` arguments."""
    home, _, name = setting.rpartition(".")
    home = _OWNERS.get(home, home)
    return f"`{name}`" if name in known or not home else f"`{home}({name}=...)`"


def constructor_arguments(cls: type) -> tuple[set[str], bool]:
    """Return the arguments of a class and of those that it passes `**kwargs` to."""
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
        if (init := vars(cls).get("__init__")) is None:
            return
        signature = inspect.signature(init)

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(self, *args, **kwargs)  # `init` names what is missing
            with arguments_checked(type(self).__name__, [cls], given.arguments):
                init(self, *args, **kwargs)
            given.apply_defaults()  # last by the class of the object itself
            self.init_args = {n: plain(v) for n, v in [*given.arguments.items()][1:]}

        cls.__init__ = __init__  # type: ignore[method-assign]


def plain(value: Any) -> Any:
    """Return a value as numbers, strings, lists and dicts, which every logger can write."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return f"{len(value)} entries" if len(value) > 100 else [plain(entry) for entry in value]
    if isinstance(value, PurePath):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return {"class": type(value).__qualname__, **getattr(value, "init_args", {})}
