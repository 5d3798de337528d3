"""Answers of the command line that need no torch: help, version, and mistakes in names and files.

They come from the schema that `scripts/config_schema.py` makes. The parser checks the rest.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lit_rlsched import __version__
from lit_rlsched.cli import help as cli_help
from lit_rlsched.cli.help import Node, class_args, class_names, settings_of
from lit_rlsched.settings import counterpart, did_you_mean
from lit_rlsched.text import hide_keys

FLAGS = ("--debug", "--print_config", "--adapter")
"""Options without a value."""
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_PARTS = ("class_path", "init_args", "dict_kwargs", "$schema")


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
        listed = "settings" if " " in self.command else "commands"
        tip = f"tip: `{self.command} --help` lists the {listed}{more}."
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
    if args[0].startswith("-"):
        return
    if args[0] not in commands:
        near = did_you_mean(args[0], commands)
        _refuse(f"There is no command `{args[0]}`: use {names}.{near}")
    command, rest = args[0], args[1:]
    for index, token in enumerate(rest):
        option, _, topic = token.partition("=")
        if option not in ("-h", "--help"):
            continue
        following = rest[index + 1 : index + 2]
        topic = topic or next((t for t in following if not t.startswith("-")), "")
        try:
            _exit(cli_help.of_command(schema(), command, topic))
        except KeyError as unknown:
            near = did_you_mean(topic, unknown.args[0])
            _refuse(f"`--help {topic}`: there is no such group or class.{near}", command)
    with suppress(Unclear):
        for message in Check(command).mistakes(rest):
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
        self._option, self._file = "", ""
        """Where what is checked was given."""

    def mistakes(self, args: list[str]) -> Iterator[str]:
        """Yield the mistakes."""
        pairs = [*_pairs(args)]
        files = {}
        for given in (v for o, v in pairs if o in ("-c", "--config") and self._settings):
            if given.lstrip().startswith("{") or "\n" in given:  # no file, but what is in one
                continue
            files[given], wrong = read_file(given)
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
                self._option, self._file = "", value
                yield from self._wrong(files[value], {"properties": self._settings}, "")
            elif option.startswith("-c") or option.endswith(".help"):
                raise Unclear
            elif option != "--debug" and not (option == "--print_config" and self._settings):
                yield from self._of_option(option, value)

    def _of_option(self, option: str, value: str) -> Iterator[str]:
        content: Any = value
        if value.lstrip().startswith(("[", "{")):
            try:
                content = yaml.load(value, Loader=UniqueKeys)
            except KeyTwice as error:
                yield f"`{option}`: {error.problem}."
                return
            except yaml.YAMLError:
                raise Unclear from None
        for name in reversed(option.removeprefix("--").rstrip("+").split(".")):
            content = {name: content}
        self._option = option
        yield from self._wrong(content, {"properties": self._options}, "")

    def options(self) -> Iterator[tuple[str, Node]]:
        """Yield all options, those of the model's classes and of the engines too."""
        found = dict(self._options)
        for name, node in self._options.items():
            for kind in alternatives(node):
                named = "class_path" in kind.get("properties", {})
                inner = class_args(kind) if named else settings_of(kind)
                found |= {f"{name}.{n}": s for n, s in inner.items()}
        yield from found.items()

    def _wrong(self, value: Any, node: Node, path: str) -> Iterator[str]:
        """Yield what is wrong in and below the setting `path`."""
        kinds = list(alternatives(node))
        items = [kind["items"] for kind in kinds if isinstance(kind.get("items"), dict)]
        groups = all(
            "properties" in kind and "class_path" not in kind["properties"] for kind in kinds
        )
        if kinds and groups and not isinstance(value, dict | str | None):  # text may name a file
            names = [f"`{name}`" for name in kinds[0]["properties"] if name[0] != "$"]
            yield f"`{path}={value}`: must hold settings by name, such as {', '.join(names[:3])}."
            return
        if isinstance(value, list) and items:
            for entry in value:
                yield from self._wrong(entry, items[0], path)
            return
        kinds += [kind for item in items for kind in alternatives(item)]
        classes = [kind for kind in kinds if class_names(kind)]
        if classes and isinstance(value, str):
            may_be_text = any("string" in o.get("type", ()) for o in node.get("anyOf", [node]))
            yield from self._choose(value, classes, path, may_be_text)
        elif classes and isinstance(value, dict):
            if isinstance(name := value.get("class_path"), str):
                yield from self._choose(name, classes, path)
            yield from self._arguments(value, classes, path)
        elif isinstance(value, dict):
            mappings = [k for k in kinds if not k or k.get("type") == "object" or "properties" in k]
            for kind in mappings if all("properties" in kind for kind in mappings) else ():
                yield from self._entries(value, kind["properties"], path, "")
        elif not fits(value, kinds):
            choices = [str(choice) for kind in kinds for choice in kind.get("enum", ())]
            yield bad_value(path, value, choices, [name for k in kinds for name in types(k)])

    def _choose(
        self, name: str, classes: list[Node], path: str, may_be_text: bool = False
    ) -> Iterator[str]:
        """Remember which class a setting has; say so if it is a known one mistyped."""
        named = [kind for kind in classes if name in class_names(kind)]
        self._classes[path] = named[0] if named else None
        near = did_you_mean(name, [n for kind in classes for n in class_names(kind)])
        if near and not named and not may_be_text and "." not in name:
            yield f"`{path}={name}`: there is no such class.{near}"

    def _arguments(self, value: Node, classes: list[Node], path: str) -> Iterator[str]:
        chosen = self._classes.get(path, classes[0])
        if chosen is None or not isinstance(value.get("init_args", {}), dict):
            return
        owner, known = f" of `{class_names(chosen)[0]}`", class_args(chosen)
        if path not in self._classes and len(classes) > 1:
            owner, known = "", {n: node for k in classes for n, node in class_args(k).items()}
        args = {n: v for n, v in value.items() if n not in _PARTS} | value.get("init_args", {})
        yield from self._entries(args, known, path, owner)

    def _entries(self, value: Node, known: Node, path: str, owner: str) -> Iterator[str]:
        prefix = f"{path}." if path else ""
        for given, inner in value.items():
            name = str(given).rstrip("+")
            if name in known:
                yield from self._wrong(inner, known[name], prefix + name)
            elif self._option and not owner:
                near = _meant(prefix + name, dict(self.options()) | {"config": None}, "--")
                yield f"There is no option `{self._option}`.{near}"
            else:
                where = f" (given in `{self._file}`)" if self._file and not owner else ""
                near = _meant(prefix + name, [prefix + n for n in known if n[0] != "$"])
                yield f"There is no setting `{prefix}{name}`{owner}{where}.{near}"


def alternatives(node: Node) -> Iterator[Node]:
    """Yield the forms that a value may have."""
    if "$ref" in node:
        yield from alternatives(schema()["$defs"][node["$ref"].rpartition("/")[2]])
    elif "anyOf" in node:
        for option in node["anyOf"]:
            yield from alternatives(option)
    else:
        yield node


def types(kind: Node) -> list[str]:
    """Return the names of a value's types."""
    names = kind.get("type", [])
    return [names] if isinstance(names, str) else names


def fits(value: Any, kinds: list[Node]) -> bool:
    """Whether something given may be such a value; True if only the parser can tell."""
    named = {name for kind in kinds for name in types(kind)}
    unclear = named - _WORDS.keys() or any("enum" not in k and not types(k) for k in kinds)
    if unclear or value is None or "$" in str(value):
        return True
    if any(str(value) == str(choice) for kind in kinds for choice in kind.get("enum", ())):
        return True
    if isinstance(value, str):
        try:
            value = (float if "number" in named else int)(value)  # also 1e-6, a text in YAML
        except ValueError:
            with suppress(yaml.YAMLError):
                value = yaml.safe_load(value)
    if value is None or isinstance(value, bool):
        return value is None or "boolean" in named
    return ("number" in named and isinstance(value, int | float)) or (
        "integer" in named and isinstance(value, int)
    )


def bad_value(key: str, given: Any, choices: list[str], names: list[str]) -> str:
    """Return a sentence about a value that is not one of the choices and has none of the types."""
    if choices:
        use = f"use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        return f"`{key}={given}`: {use}.{did_you_mean(str(given), choices)}"
    said = f"`{key}={given}`: must be {' or '.join(_WORDS.get(n, n) for n in names)}."
    with suppress(ValueError, OverflowError):  # `1e3` is a text in YAML
        if "integer" in names and (number := float(str(given))) == int(number):
            return f"{said} Write `{int(number)}`."
    return said


def _meant(key: str, known: Iterable[str], dashes: str = "") -> str:
    """Return what was probably meant; `key` may end with a name of TRL's."""
    said = counterpart(
        key.rpartition(".")[2], lambda name: f"`{dashes if name[0].islower() else ''}{name}`"
    )
    return said or did_you_mean(dashes + key, [dashes + name for name in known])


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


class KeyTwice(yaml.MarkedYAMLError):  # type: ignore[misc]
    """A key stands twice."""


class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that stands twice, as one of its values would be lost."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Compose a mapping."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (name := (key.tag, key.value)) in lines:
                problem = (
                    f"`{key.value}` stands in line {lines[name]} already, and one of the two would "
                    "be lost. Make them one"
                )
                raise KeyTwice(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node


def read_file(given: str) -> tuple[dict[str, Any], str]:
    """Return the settings in a file, or a sentence about what is wrong with it."""
    path = Path(given)
    if not path.is_file():
        folder = path.parent.glob("*.y*ml") if path.parent.is_dir() else []
        near = did_you_mean(given, map(str, folder))
        return {}, f"`--config {path}`: there is no such file.{near}"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        return {}, f"`{given}`{line} is not valid YAML: {error.problem}."
    except (yaml.YAMLError, OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return {}, f"`{given}` cannot be read as YAML: {' '.join(str(error).split())}."
    if content is None:
        return {}, f"`{given}` is empty. Write settings into it, or leave it out of the command."
    if not isinstance(content, dict):
        kind = "list" if isinstance(content, list) else "single value"
        return {}, f"`{given}` holds a {kind}. It must hold settings, such as `data:`, by name."
    return content, ""
