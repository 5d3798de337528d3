"""What jsonargparse finds wrong, in a sentence that names the setting and what may be meant."""

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "NoneType": "null",
}


def plain(message: str, parser: argparse.ArgumentParser) -> str:
    """One sentence or two instead of a tree of types; what is not known stays as it is.

    Args:
        message: Of jsonargparse.
        parser: Whose settings it is about.
    """
    for pattern, say in _WORDINGS:
        if (match := re.search(pattern, message, re.DOTALL)) is not None:
            return say(match, message, parser)
    return message


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean ...?`, or nothing where no known name is near."""
    near = get_close_matches(name, sorted(set(known)), n=1, cutoff=0.7)
    return f" Did you mean `{near[0]}`?" if near else ""


def _unknown_option(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    given = match[1].split()[0]
    name = given.partition("=")[0]
    if not name.startswith("-"):
        fix = f" Did you mean `--config {name}`?" if Path(name).is_file() else ""
        return f"`{name}` is no option.{fix}"
    return f"There is no option `{name}`.{did_you_mean(name, _options(parser))}"


def _unknown_key(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    names = [option.removeprefix("--") for option in _options(parser)]
    where = "".join(f"`{path}`: " for path, file in _files(parser) if _has(file, match[1]))
    there = "there" if where else "There"
    return f"{where}{there} is no setting `{match[1]}`.{did_you_mean(match[1], names)}"


def _unknown_argument(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    path, name = match[1], match[2]
    where, owner = _key(message), path.rpartition(".")[2]
    prefix = f"{where}." if where else ""
    near = did_you_mean(name, _arguments(path)).replace("`", f"`{prefix}", 1)
    return f"There is no setting `{prefix}{name}` of `{owner}`.{near}"


def _unknown_class(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    given = match[1]
    name = given.rpartition(".")[2]
    return f"`{_key(message)}={given}`: there is no such class.{did_you_mean(name, _classes())}"


def _bad_value(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    expected, given = match[1], match[2].strip()
    choices = re.findall(r"'([^']*)'", expected) if "Literal" in expected else []
    if choices:
        use = f"use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        return f"`{_key(message)}={given}`: {use}.{did_you_mean(given, choices)}"
    return f"`{_key(message)}={given}`: must be {_type(expected)}."


def _bad_union(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    given = message.rpartition("Given value: ")[2].strip()
    types = " or ".join(_type(t) for t in match[1].split(", "))
    return f"`{_key(message)}={given}`: must be {types}."


def _no_function(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    return f"`{_key(message)}={match[2].strip()}`: {match[1].strip()}."


def _no_file(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    return f"`--config {match[1]}`: there is no such file."


def _no_yaml(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    for path, file in _files(parser):
        try:
            yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.MarkedYAMLError as error:
            line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            return f"`{path}`{line} is not YAML: {error.problem}."
    return message


def _missing(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    names = [name.partition(".")[2] or name for name in match[1].split(", ")]
    listed = ", ".join(f"`{name}`" for name in names)
    return f"{listed} must be given: in a file (`--config run.yaml`) or as `--{names[0]}=...`."


def _command(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    choices = re.findall(r"[a-z]+", match[2])
    return f"`{match[1]}` is no command: use {', '.join(choices)}.{did_you_mean(match[1], choices)}"


def _no_command(match: re.Match[str], message: str, parser: argparse.ArgumentParser) -> str:
    return f"Which command? Use {', '.join(match[1].split(','))}."


_NO_CLASS = r"Expected a dot import path string: ([\w.]+)"
_WORDINGS: tuple[tuple[str, Callable[..., str]], ...] = (
    (r"unrecognized arguments: (.+)", _unknown_option),
    (r"does not accept option '([\w.]+)'", _unknown_key),
    (r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", _unknown_argument),
    (
        r"(?s:.*)Expected a (typing\.Literal\[[^\]]*\]|<class '\w+'>)\. Got value: (.*?)(?:\n|$)",
        _bad_value,
    ),
    (_NO_CLASS, _unknown_class),
    (r"a callable class: (.*)\. Got value: (.*)", _no_function),
    (r'"config": File does not exist: \'(.*)\'', _no_file),
    (r"Problems parsing config: ", _no_yaml),
    (r"Subtypes: \[((?:<class '(?:int|float|str|bool|NoneType)'>(?:, )?)+)\]", _bad_union),
    (r"arguments are required: (.+)", _missing),
    (r"argument subcommand: invalid choice: '(\w+)' \(choose from (.*)\)", _command),
    (r'expected "subcommand" to be one of \{([\w,]+)', _no_command),
)


def _key(message: str) -> str:
    """The setting that a message is about, outermost name first."""
    keys = re.findall(r'Parser key "([\w.]+)":', message)
    return ".".join(key for key in keys if key != "config")


def _type(text: str) -> str:
    name = text.removeprefix("<class '").removesuffix("'>")
    return _TYPES.get(name, name)


def _files(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Path]]:
    """Configuration files as they were given, and where they are."""
    args = getattr(parser, "args", ())
    given = [path for option, path in pairwise(args) if option in ("-c", "--config")]
    for path in [*given, *(a.removeprefix("--config=") for a in args if "--config=" in a)]:
        # a configuration is parsed in its own folder
        file = next((f for f in (Path(path), Path(Path(path).name)) if f.is_file()), None)
        if file is not None:
            yield path, file


def _has(file: Path, key: str) -> bool:
    """Whether a file has a setting, such as `data.seed`."""
    try:
        node = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False  # another file than the one that is refused
    for name in key.split("."):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [o for action in parser._actions for o in action.option_strings if o.startswith("--")]


def _arguments(path: str) -> set[str]:
    """What a class and the classes it inherits from take."""
    module, _, name = path.rpartition(".")
    cls: Any = getattr(import_module(module), name)
    owners = [c for c in inspect.getmro(cls) if "__init__" in vars(c) and c is not object]
    return {n for c in owners for n in inspect.signature(vars(c)["__init__"]).parameters} - {"self"}


def _classes() -> list[str]:
    """Short names that a configuration may use."""
    from lit_rlsched import callbacks, engines
    from lit_rlsched.data import tasks

    ours = ["GRPOModule", "RLOOModule", *callbacks.__all__, *engines.__all__]
    made = [n for n, c in vars(tasks).items() if inspect.isclass(c)]
    return [*ours, *made, *lightning_callbacks.__all__, *loggers.__all__]
