"""Errors of jsonargparse in one line that names the setting.

`quick` finds most mistakes before the parser is made; these are left: names in a user's own classes
and functions, and what only the parser checks.
"""

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from lit_rlsched.cli.quick import whole_number
from lit_rlsched.settings import constructor_arguments, did_you_mean


def plain(message: str, parser: argparse.ArgumentParser) -> str:
    """Return one line for an error of jsonargparse."""
    keys = re.findall(r'Parser key "([\w.]+)":', message)  # the outermost comes first
    key = ".".join(key for key in keys if key != "config")
    if match := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        shown = (a for a in parser._actions if a.help != argparse.SUPPRESS)
        options = [option for action in shown for option in action.option_strings]
        return f"There is no option `{match[1]}`.{did_you_mean(match[1], options)}"
    for pattern, say in _WORDINGS:
        if match := re.search(pattern, message, re.DOTALL):
            return say(match, key)
    text = message.partition("Errors:\n")[2].strip() or message
    first = re.split(r"\n\s*- |\n\s*Given value|\. Got value: Namespace", text)[0]
    *_, words = re.split(r'Parser key "[\w.]+":', first)
    said = " ".join(words.removeprefix("- ").split())
    value = re.search(r"Given value: ([^\n]*)", message)
    given = f"={value[1]}" if value else ""
    return f"`{key}{given}`: {said}" if key else said


def _no_argument(match: re.Match[str], key: str) -> str:
    path, name = match["path"], match["name"]
    if path == "lightning.LightningModule":
        return f"`{key}.{name}`: no class is named. Add it in front: `--{key}=GRPOModule`."
    module, _, class_name = path.rpartition(".")
    known, _ = constructor_arguments(getattr(import_module(module), class_name))
    near = did_you_mean(name, known).replace("`", f"`{key}.", 1)
    return f"There is no setting `{key}.{name}` of `{class_name}`.{near}"


def _no_import(match: re.Match[str], key: str) -> str:
    home, _, name = match["path"].rpartition(".")
    near = ""
    with suppress(ImportError, ValueError):
        near = did_you_mean(name, vars(import_module(home))).replace("`", f"`{home}.", 1)
    return f"`{key}={match['path']}`: {match['why']}.{near}"


def _other_class(match: re.Match[str], key: str) -> str:
    return f"`{key}={match['path']}`: must be a subclass of `{match['parent']}`."


def _other_type(match: re.Match[str], key: str) -> str:
    types = re.findall(r"Expected a ([^\n]+?)(?:\. Got value|$)", match["types"], re.MULTILINE)
    said: dict[str, None] = {}
    for name in types:
        name = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", name)
        if name.startswith("typing.Literal["):
            said |= dict.fromkeys(
                name.removeprefix("typing.Literal[").removesuffix("]").split(", ")
            )
        else:
            said[_TYPES.get(name, name)] = None
    value = match["value"]
    whole = whole_number(value) if _TYPES["int"] in said else ""
    return f"`{key}={value}`: must be {' or '.join(said)}.{whole}"


def _missing(match: re.Match[str], key: str) -> str:
    names = match["names"].split(", ")
    # arguments of a class, or settings of a subcommand
    names = [f"{key}.{name}" if key else name.partition(".")[2] or name for name in names]
    listed = ", ".join(f"`{name}`" for name in names)
    return f"{listed} must be given: in a file (`--config run.yaml`) or as `--{names[0]}=...`."


def _no_settings(match: re.Match[str], key: str) -> str:
    given = f"`{match['text']}`" if match["text"] else "an empty one"
    return f"A configuration holds settings by name, such as `data:`, and this is {given}."


_CLASS = r"class_path ?=?'(?P<path>[\w.]+)'"
_WHY = r"(?P<why>(?:module '[\w.]+' has no|No module named)[^\n]*?)"
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "dict": "a mapping",
    "NoneType": "null",
}
_EXPECTED = r"Expected a [^\n]+"
_WORDINGS: tuple[tuple[str, Callable[[re.Match[str], str], str]], ...] = (
    (rf"{_CLASS}:\s+Option '(?P<name>\w+)' is not accepted", _no_argument),
    (rf"Option '(?P<name>\w+)' is not accepted.*?{_CLASS}", _no_argument),
    (rf"{_CLASS}:\s+{_WHY}\n", _no_import),
    (rf"{_WHY}\. Got value: (?:Namespace\(class_path=')?(?P<path>[\w.]+)", _no_import),
    (r"subclass of (?P<parent>\w+).*Given value: (?P<path>[^\n]*)", _other_class),
    (
        rf"(?P<types>{_EXPECTED}?)\. Got value: (?P<value>[^\n]*?)(?:\. Got value: |\n|$)",
        _other_type,
    ),
    (
        rf"Errors:\s+(?P<types>(?:- {_EXPECTED}\s+)+)Given value type: [^\n]*\s+"
        r"Given value: (?P<value>[^\n]*)",
        _other_type,
    ),
    (r"Unexpected config: *(?P<text>[^\n]*)", _no_settings),
    (r"arguments are required: (?P<names>[^\n]+)", _missing),
)
"""Pattern of jsonargparse's message and the function that rewords it; the first match counts."""
