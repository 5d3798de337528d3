"""Errors of jsonargparse as one sentence that names the setting, its value and the likely fix."""

import argparse
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import yaml
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers

from lit_rlsched.cli.quick import bad_value, bad_yaml, no_file
from lit_rlsched.settings import constructor_arguments, did_you_mean

_TYPES = {
    "int": "integer",
    "float": "number",
    "str": "text",
    "bool": "boolean",
    "NoneType": "null",
}
_Parser = argparse.ArgumentParser


def plain(message: str, parser: _Parser) -> str:
    """Return a plain sentence for an error of jsonargparse; an unknown error stays as it is.

    Args:
        message: Error message of jsonargparse.
        parser: Parser that raised it.
    """
    keys = re.findall(r'Parser key "([\w.]+)":', message)  # the outermost comes first
    key = ".".join(key for key in keys if key != "config")
    for pattern, say in _WORDINGS:
        if (match := re.search(pattern, message, re.DOTALL)) is not None:
            return say(match, key, parser) or message
    return message


def refused_by_class(message: str) -> str:
    """Return what a class refuses, without the list of types that jsonargparse tried in its place.

    Args:
        message: Message of an error while the objects of a configuration are made.
    """
    tried = r"Does not validate against any of the Union.*?Errors:\n\s*- (`[^\n]*)"
    found = re.match(tried, message, re.DOTALL)
    return found[1] if found else message


def _unknown_option(match: re.Match[str], key: str, parser: _Parser) -> str:
    name = match[1].split()[0].partition("=")[0]
    if not name.startswith("-"):
        fix = f" Did you mean `--config {name}`?" if Path(name).is_file() else ""
        return f"`{name}` is not an option.{fix}"
    return f"There is no option `{name}`.{did_you_mean(name, _options(parser))}"


def _unknown_setting(match: re.Match[str], key: str, parser: _Parser) -> str:
    name, known = match[1], [option.removeprefix("--") for option in _options(parser)]
    where = "".join(f" (given in `{path}`)" for path, file in _files(parser) if _has(file, name))
    return f"There is no setting `{name}`{where}.{did_you_mean(name, known)}"


def _unknown_argument(match: re.Match[str], key: str, parser: _Parser) -> str:
    return _no_argument(match[1], match[2], key)


def _no_argument(path: str, name: str, key: str) -> str:
    prefix = f"{key}." if key else ""
    if path == "lightning.LightningModule":
        return f"`{prefix}{name}`: no class is named. Add it in front: `--{key}=GRPOModule`."
    module, _, class_name = path.rpartition(".")
    known, _ = constructor_arguments(getattr(import_module(module), class_name))
    near = did_you_mean(name, known).replace("`", f"`{prefix}", 1)
    return f"There is no setting `{prefix}{name}` of `{class_name}`.{near}"


def _unknown_class(match: re.Match[str], key: str, parser: _Parser) -> str:
    near = did_you_mean(match[1].rpartition(".")[2], _classes())
    return f"`{key}={match[1]}`: there is no such class.{near}"


def _bad_value(match: re.Match[str], key: str, parser: _Parser) -> str:
    expected, given = match[1], match[2].partition(". Got value: ")[0].strip()
    choices = re.findall(r"'([^']*)'", expected) if "Literal" in expected else []
    types = re.findall(r"<class '(\w+)'>", expected) or [expected]
    return bad_value(key, given, choices, [_TYPES.get(name, name) for name in types])


def _bad_import(match: re.Match[str], key: str, parser: _Parser) -> str:
    path, why = match["path"].strip(), match["why"].strip()
    if made := re.match(r"Namespace\(class_path='([\w.]+)'", path):  # a class with its arguments
        path = made[1]
        if option := re.match(r"Option '(\w+)' is not accepted", why):
            return _no_argument(path, option[1], key)
    home, _, name = path.rpartition(".")
    near = ""
    with suppress(ImportError, ValueError):
        near = did_you_mean(name, vars(import_module(home))).replace("`", f"`{home}.", 1)
    return f"`{key}={path}`: {why}.{near}"


def _other_class(match: re.Match[str], key: str, parser: _Parser) -> str:
    return f"`{key}={match[2].strip()}`: must be a subclass of `{match[1]}`."


def _no_file(match: re.Match[str], key: str, parser: _Parser) -> str:
    return no_file(Path(match[1]))


def _bad_yaml(match: re.Match[str], key: str, parser: _Parser) -> str:
    return next(filter(None, (bad_yaml(path, file) for path, file in _files(parser))), "")


def _missing(match: re.Match[str], key: str, parser: _Parser) -> str:
    names = match[1].split(", ")
    if key:  # arguments of a class
        names = [f"{key}.{name}" for name in names]
    else:  # settings of a subcommand
        names = [name.partition(".")[2] or name for name in names]
    listed = ", ".join(f"`{name}`" for name in names)
    return f"{listed} must be given: in a file (`--config run.yaml`) or as `--{names[0]}=...`."


_WORDINGS: tuple[tuple[str, Callable[[re.Match[str], str, _Parser], str]], ...] = (
    (r"unrecognized arguments: (.+)", _unknown_option),
    (r"does not accept option '([\w.]+)'", _unknown_setting),
    (r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", _unknown_argument),
    (r".*Expected a (typing\.Literal\[[^\]]*\]|<class '\w+'>)\. Got value: ([^\n]*)", _bad_value),
    (r"Expected a dot import path string: ([\w.]+)", _unknown_class),
    (
        r"Problem with given class_path '(?P<path>[\w.]+)':\s+(?P<why>(?:module|No module)[^\n]*)",
        _bad_import,
    ),
    (r"does not correspond to a subclass of (\w+).*Given value: ([^\n]*)", _other_class),
    (
        r"a callable class: (?P<why>[^\n]*?)(?:\. Got value: |\n.*Given value: )(?P<path>[^\n]*)",
        _bad_import,
    ),
    (r'"config": File does not exist: \'(.*)\'', _no_file),
    (r"Problems parsing config: ", _bad_yaml),
    (
        r"Subtypes: \[((?:<class '(?:int|float|str|bool|NoneType)'>(?:, )?)+)\]"
        r".*Given value: (.*)",
        _bad_value,
    ),
    (
        r"Subtypes: \[(typing\.Literal\[[^\n]*)\]\n.*?Given value: ([^\n]*)",
        _bad_value,
    ),
    (r"arguments are required: ([^\n]+)", _missing),
)
"""Pattern of jsonargparse's message and the function that rewords it; the first match counts."""


def _files(parser: _Parser) -> Iterator[tuple[str, Path]]:
    """Yield each configuration file as it was given and its path from here."""
    args = getattr(parser, "args", ())
    given = [path for option, path in pairwise(args) if option in ("-c", "--config")]
    for path in [*given, *(a.removeprefix("--config=") for a in args if "--config=" in a)]:
        # jsonargparse changes to the folder of a configuration file to parse it
        file = next((f for f in (Path(path), Path(Path(path).name)) if f.is_file()), None)
        if file is not None:
            yield path, file


def _has(file: Path, key: str) -> bool:
    """Return whether a configuration file has a setting, such as `data.seed`."""
    with suppress(yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        reduce(operator.getitem, key.split("."), settings)
        return True
    return False


def _options(parser: _Parser) -> list[str]:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return [o for action in shown for o in action.option_strings if o.startswith("--")]


def _classes() -> list[str]:
    """Return the names of classes that a configuration may use without their module."""
    from lit_rlsched import callbacks, engines
    from lit_rlsched.data import tasks

    ours = ["GRPOModule", "RLOOModule", *callbacks.__all__, *engines.__all__]
    made = [n for n, c in vars(tasks).items() if inspect.isclass(c)]
    return [*ours, *made, *lightning_callbacks.__all__, *loggers.__all__]
