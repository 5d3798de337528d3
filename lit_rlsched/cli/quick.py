"""Answers of the command line that need no torch: help, version, and mistakes in names and files.

They come from the JSON Schema of configuration files, which `scripts/config_schema.py` makes from
the parser itself. The parser checks the rest, such as a user's class.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lit_rlsched import __version__
from lit_rlsched.cli import config_files
from lit_rlsched.cli import help as cli_help
from lit_rlsched.settings import did_you_mean, suggestion
from lit_rlsched.text import hide_keys

Node = dict[str, Any]
"""A part of the schema."""
FLAGS = ("--debug", "--print_config", "--adapter")
"""Options without a value."""
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_PARTS = ("class_path", "init_args", "dict_kwargs")


@cache
def schema() -> Node:
    """Return the schema of configuration files."""
    return json.loads((Path(__file__).parents[1] / "lit-rlsched.schema.json").read_text("utf-8"))


class Refusal(SystemExit):
    """Exit with code 2 because of a wrong setting."""

    def __init__(self, message: str, command: str) -> None:
        super().__init__(2)
        self.message = message
        self.command = command

    def show(self, more: str = "") -> None:
        """Print the message to stderr."""
        tip = f"tip: `{self.command} --help` lists the settings{more}."
        print(f"error: {hide_keys(self.message)}\n{tip}", file=sys.stderr, flush=True)


def answer(args: list[str]) -> None:
    """Print help, the version or a mistake and exit; return if the command has to run."""
    commands: Node = schema()["x-commands"]
    names = ", ".join(commands)
    if "--version" in args:
        _exit(f"lit-rlsched {__version__}")
    if not args:
        _refuse(f"A command is missing: use {names}.")
    if args[0] in ("-h", "--help"):
        _exit(cli_help.overview(schema()))
    if args[0] == "--completion":
        _exit(_completion("".join(args[1:])))
    if args[0].startswith("-"):
        return
    if args[0] not in commands:
        near = did_you_mean(args[0], commands)
        _refuse(f"There is no command `{args[0]}`: use {names}.{near}")
    command, rest = args[0], args[1:]
    if (topic := _help(rest)) is not None:
        try:
            _exit(cli_help.of_command(schema(), command, topic))
        except KeyError as unknown:
            near = did_you_mean(topic, unknown.args[0])
            _refuse(f"`--help {topic}`: there is no such group or class.{near}", command)
    try:
        message = next(Check(command).mistakes(rest), None)
    except Unclear:
        return
    if message:
        _refuse(message, command)


def _exit(text: str) -> NoReturn:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def _refuse(message: str, command: str = "") -> NoReturn:
    refusal = Refusal(message, f"lit-rlsched {command}".strip())
    refusal.show()
    raise refusal


def _help(args: list[str]) -> str | None:
    """Return the topic that help is asked about, empty for the command itself."""
    for index, token in enumerate(args):
        option, _, topic = token.partition("=")
        if option in ("-h", "--help"):
            following = args[index + 1 : index + 2]
            return topic or next((t for t in following if not t.startswith("-")), "")
    return None


@dataclass(frozen=True)
class Unknown:
    """A name that the schema does not have."""

    key: str
    """The setting, such as `data.num_generation`."""
    known: list[str]
    """What could be there."""
    owner: str
    """` of CLASS` for a class's argument."""

    def message(self, where: str = "") -> str:
        """Return a sentence with what was probably meant."""
        near = _meant(self.key, self.known)
        return f"There is no setting `{self.key}`{self.owner}{where}.{near}"


def _completion(shell: str) -> str:
    """Return a script that lets a shell complete commands, options and their choices."""
    try:
        import shtab
    except ImportError:
        _refuse("`--completion` needs shtab: pip install shtab.")
    if shell not in shtab.SUPPORTED_SHELLS:
        _refuse(f"`--completion {shell}`: use {', '.join(map(repr, shtab.SUPPORTED_SHELLS))}.")
    parser = argparse.ArgumentParser("lit-rlsched")
    commands = parser.add_subparsers()
    for name, about in schema()["x-commands"].items():
        command = commands.add_parser(name, help=about["description"])
        check = Check(name)
        for option, node in check.options():
            dashes = "" if option in check.arguments else "--"
            action = command.add_argument(
                f"{dashes}{option}", choices=cli_help.choices(schema(), node)
            )
            if action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        if about["run"]:
            command.add_argument("-c", "--config").complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


class Unclear(Exception):
    """Only the parser can tell whether something is right."""


class Check:
    """Looks for mistakes in the arguments of a command."""

    def __init__(self, command: str) -> None:
        about = schema()["x-commands"][command]
        self._settings: Node = schema()["properties"] if about["run"] else {}
        shared = {n: s for n, s in self._settings.items() if n in cli_help.SHARED}
        self._options: Node = shared | about["options"]
        self.arguments: list[str] = about["arguments"]
        """Those without dashes."""
        self._classes: dict[str, Node | None] = {}
        """Class last chosen for each setting that has one; None for a user's class."""

    def mistakes(self, args: list[str]) -> Iterator[str]:
        """Yield the mistakes."""
        pairs = [*_pairs(args)]
        files = {}
        for given in (v for o, v in pairs if o in ("-c", "--config") and self._settings):
            if given.lstrip().startswith("{") or "\n" in given:  # no file, but what is in one
                continue
            files[given], wrong = config_files.read(given)
            if wrong:  # whatever cannot be judged of the rest
                yield wrong
        for option, value in pairs:
            if not option and self.arguments:
                continue
            if not option:
                fix = f" Did you mean `--config {value}`?" if Path(value).is_file() else ""
                yield f"`{value}` is not an option.{fix}"
            elif option in ("-c", "--config") and self._settings:
                if value not in files:
                    raise Unclear
                yield from self._file(value, files[value])
            elif option.startswith("-c") or option.endswith(".help"):
                raise Unclear
            elif option != "--debug" and not (option == "--print_config" and self._settings):
                yield from self._option(option, value)

    def _file(self, given: str, content: Node) -> Iterator[str]:
        for wrong in self._wrong(content, {"properties": self._settings}, ""):
            where = "" if isinstance(wrong, Unknown) and wrong.owner else f" (given in `{given}`)"
            yield wrong if isinstance(wrong, str) else wrong.message(where)

    def _option(self, option: str, value: str) -> Iterator[str]:
        path = option.removeprefix("--").rstrip("+").split(".")
        content: Any = value
        if value.lstrip().startswith(("[", "{")):
            try:
                content = yaml.load(value, Loader=config_files.UniqueKeys)
            except config_files.KeyTwice as error:
                yield f"`{option}`: {error.problem}."
                return
            except yaml.YAMLError:
                raise Unclear from None
        for name in reversed(path):
            content = {name: content}
        for wrong in self._wrong(content, {"properties": self._options}, ""):
            if isinstance(wrong, str):
                yield wrong
            elif wrong.owner:
                yield wrong.message()
            else:
                near = _meant(wrong.key, dict(self.options()), "--")
                yield f"There is no option `{option}`.{near}"

    def options(self) -> Iterator[tuple[str, Node]]:
        """Yield all options, those of the model's classes and of the engines too."""
        found = dict(self._options)
        for name, node in self._options.items():
            for kind in alternatives(node):
                args = kind.get("properties", {})
                inner = class_args(kind) if "class_path" in args else args
                found |= {
                    f"{name}.{n}": s for n, s in inner.items() if n[0] != "$" and n[-1] != "+"
                }
        yield from found.items()

    def _wrong(self, value: Any, node: Node, path: str) -> Iterator[Unknown | str]:
        """Yield unknown names in and below the setting `path`, or a sentence."""
        kinds = list(alternatives(node))
        items = [kind["items"] for kind in kinds if isinstance(kind.get("items"), dict)]
        groups = all(
            "properties" in kind and "class_path" not in kind["properties"] for kind in kinds
        )
        if kinds and groups and not isinstance(value, dict | str | None):  # text may name a file
            names = [f"`{name}`" for name in kinds[0]["properties"] if name[0] != "$"]
            yield f"`{path}={value}`: must hold settings by name, such as {', '.join(names[:3])}."
            return
        if isinstance(value, list):
            for entry in value if items else ():
                yield from self._wrong(entry, items[0], path)
            return
        kinds += [kind for item in items for kind in alternatives(item)]
        classes = [kind for kind in kinds if "enum" in _class_path(kind)]
        if classes and isinstance(value, str):
            yield from self._choose(value, classes, path, takes_text(node))
        elif classes and isinstance(value, dict):
            if isinstance(name := value.get("class_path"), str):
                yield from self._choose(name, classes, path)
            yield from self._arguments(value, classes, path)
        elif isinstance(value, dict) and all("properties" in k for k in kinds if is_mapping(k)):
            for kind in filter(is_mapping, kinds):
                yield from self._entries(value, kind["properties"], path, "")
        elif isinstance(value, str) and not fits(value, kinds):
            choices = [str(choice) for kind in kinds for choice in kind.get("enum", ())]
            yield bad_value(path, value, choices, [name for k in kinds for name in types(k)])

    def _choose(
        self, name: str, classes: list[Node], path: str, may_be_text: bool = False
    ) -> Iterator[str]:
        """Remember which class a setting has; say so if it is a known one mistyped."""
        named = [kind for kind in classes if name in _class_path(kind)["enum"]]
        self._classes[path] = named[0] if named else None
        known = [n for kind in classes for n in _class_path(kind)["enum"]]
        near = did_you_mean(name, known)
        if near and not named and not may_be_text and "." not in name:
            yield f"`{path}={name}`: there is no such class.{near}"

    def _arguments(self, value: Node, classes: list[Node], path: str) -> Iterator[Unknown | str]:
        chosen = self._classes.get(path, classes[0])
        if chosen is None or not isinstance(value.get("init_args", {}), dict):
            return
        owner = f" of `{_class_path(chosen)['enum'][0]}`"
        known = class_args(chosen)
        if path not in self._classes and len(classes) > 1:
            owner, known = "", {n: node for k in classes for n, node in class_args(k).items()}
        args = {n: v for n, v in value.items() if n not in _PARTS} | value.get("init_args", {})
        yield from self._entries(args, known, path, owner)

    def _entries(self, value: Node, known: Node, path: str, owner: str) -> Iterator[Unknown | str]:
        prefix = f"{path}." if path else ""
        for given, inner in value.items():
            name = str(given).rstrip("+")
            if name in known:
                yield from self._wrong(inner, known[name], prefix + name)
            else:
                names = [prefix + one for one in known if not one.startswith("$")]
                yield Unknown(prefix + name, names, owner)


def alternatives(node: Node) -> Iterator[Node]:
    """Yield the forms that a value may have."""
    if "$ref" in node:
        yield from alternatives(schema()["$defs"][node["$ref"].rpartition("/")[2]])
    elif "anyOf" in node:
        for option in node["anyOf"]:
            yield from alternatives(option)
    else:
        yield node


def takes_text(node: Node) -> bool:
    """Whether a setting with classes may be a string that names none."""
    return any("string" in option.get("type", ()) for option in node.get("anyOf", [node]))


def is_mapping(node: Node) -> bool:
    """Whether a value of this form may be a mapping."""
    return not node or node.get("type") == "object" or "properties" in node


def types(kind: Node) -> list[str]:
    """Return the names of a value's types."""
    names = kind.get("type", [])
    return [names] if isinstance(names, str) else names


def fits(text: str, kinds: list[Node]) -> bool:
    """Whether a text may be such a value; True if only the parser can tell."""
    named = {name for kind in kinds for name in types(kind)}
    if named - _WORDS.keys() or any("enum" not in k and not types(k) for k in kinds) or "$" in text:
        return True
    if any(text == str(choice) for kind in kinds for choice in kind.get("enum", ())):
        return True
    try:
        (float if "number" in named else int)(text)  # also 1e-6, which YAML reads as text
        return bool(named & {"integer", "number"})
    except ValueError:
        pass
    try:
        return not isinstance(yaml.safe_load(text), str)
    except yaml.YAMLError:
        return True


def bad_value(key: str, given: str, choices: list[str], names: list[str]) -> str:
    """Return a sentence about a value that is not one of the choices and has none of the types."""
    if choices:
        use = f"use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        return f"`{key}={given}`: {use}.{did_you_mean(given, choices)}"
    said = f"`{key}={given}`: must be {' or '.join(_WORDS.get(n, n) for n in names)}."
    return f"{said}{whole_number(given)}" if "integer" in names else said


def whole_number(given: str) -> str:
    """Return how to write a number such as `1e3` as a whole one; empty if it is none."""
    try:
        number = float(given)
        return f" Write `{int(number)}`." if number == int(number) else ""
    except (ValueError, OverflowError):
        return ""


def _class_path(kind: Node) -> Node:
    return kind.get("properties", {}).get("class_path", {})


def class_args(kind: Node) -> Node:
    """Return the arguments of a class by their names."""
    return kind["properties"].get("init_args", {}).get("properties", {})


def _meant(key: str, known: Iterable[str], dashes: str = "") -> str:
    """Return what was probably meant; `key` may end with a name of TRL's."""
    shown = [dashes + name for name in known]
    name = key.rpartition(".")[2]
    return suggestion(name, [], partial(_written, dashes)) or did_you_mean(dashes + key, shown)


def _written(dashes: str, setting: str) -> str:
    return f"`{dashes if setting[0].islower() else ''}{setting}`"


def _pairs(args: list[str]) -> Iterator[tuple[str, str]]:
    """Yield options and their values; an argument that belongs to none as the value of ``."""
    rest = iter(args)
    for token in rest:
        option, given, value = token.partition("=")
        if not token.startswith("-"):
            yield "", token
        elif given or option in FLAGS or option.endswith(".help"):
            yield option, value
        else:
            yield option, next(rest, "")
