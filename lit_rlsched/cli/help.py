"""Help of the command line, from the JSON Schema of configuration files."""

import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size
from typing import Any

Node = dict[str, Any]
"""A part of the schema."""
SHARED = ("seed_everything", "trainer", "model", "data")
"""Settings of all commands that use a run's configuration."""
GROUPS = SHARED[1:]
KINDS = {
    "Callback": "callbacks",
    "RolloutEngine": "engines",
    "PromptTask": "tasks",
    "LengthPredictor": "predictors",
    "Logger": "loggers",
}
"""Base classes whose subclasses a command's help lists; of callbacks, this package's."""
_WORDS = {
    **{"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"},
    **{"null": "null", "array": "list", "object": "mapping"},
}
_FILE = {
    "-c, --config FILE": "Configuration file in YAML. Of several the last one wins.",
    "--print_config": "Print the configuration that all arguments give, and exit.",
}
_ALWAYS = {
    "--debug": "Print the traceback of an error in the settings.",
    "--help TOPIC": "Help on a group of settings or a class, as listed below, or on `all`.",
}


def overview(schema: Node) -> str:
    """Return the help of `lit-rlsched` itself."""
    lines = ["usage: lit-rlsched COMMAND [--config FILE ...] [--SETTING=VALUE ...]", ""]
    for name, about in schema["x-commands"].items():
        lines += _item(f"{name:11}", about["description"], 13, beside=True)
    tip = (
        "`lit-rlsched COMMAND --help` says what a command takes, `lit-rlsched --version` prints "
        "the version."
    )
    return "\n".join([*lines, "", *_wrapped(tip)])


def of_command(schema: Node, command: str, topic: str) -> str:
    """Return the help of a command."""
    about = schema["x-commands"][command]
    kinds = [kind for node in schema["$defs"].values() for kind in node.get("anyOf", ())]
    classes = {paths[0]: kind for kind in kinds if (paths := class_names(kind))}
    topics = [*GROUPS, *classes] if about["run"] else []
    if topic in GROUPS and about["run"]:
        return "\n".join(_group(schema, topic))
    if topic in classes and about["run"]:
        return "\n".join(_class(topic, classes[topic]))
    if topic not in ("", "all"):
        raise KeyError([*topics, "all"])
    usage = "[--config FILE ...] [--SETTING=VALUE ...]" if about["run"] else "[--OPTION=VALUE ...]"
    given = "".join(f"{name.upper()} ... " for name in about["arguments"])
    lines = [f"usage: lit-rlsched {command} {given}{usage}", ""]
    lines += [*_wrapped(about["description"]), ""]
    for option, text in (_FILE if about["run"] else {}).items():
        lines += _item(option, text)
    own = {"seed_everything": schema["properties"]["seed_everything"]} if about["run"] else {}
    for name, node in {**about["options"], **own}.items():
        lines += _setting(name, node, dashes="" if name in about["arguments"] else "--")
    for option, text in _ALWAYS.items():
        if about["run"] or option == "--debug":
            lines += _item(option, text)
    if not about["run"]:
        return "\n".join(lines)
    if topic == "all":
        for group in GROUPS:
            lines += ["", *_group(schema, group)]
        for name, kind in classes.items():
            lines += ["", *_class(name, kind)]
    else:
        lines += ["", "Topics:"]
        for group in GROUPS:
            lines += _item(f"{group:11}", schema["properties"][group]["description"], 13, True)
        for base, plural in KINDS.items():
            named = filter(None, map(class_names, schema["$defs"][base]["anyOf"]))
            ours = base == "Callback"
            shown = sorted(n[0] for n in named if not ours or n[1].startswith("lit_rlsched."))
            lines += _item(f"{plural:11}", ", ".join(shown), 13, True)
        lines += ["", f"Such as `lit-rlsched {command} --help data`."]
    return "\n".join(lines)


def _group(schema: Node, group: str) -> Iterator[str]:
    node = schema["properties"][group]
    yield f"{node['description']}:"
    if group != "model":
        for name, setting in settings_of(node).items():
            yield from _setting(f"{group}.{name}", setting)
        return
    first, *others = [
        kind for kind in schema["$defs"]["LightningModule"]["anyOf"] if class_names(kind)
    ]
    shown = class_args(first)
    for name, setting in shown.items():
        yield from _setting(f"model.{name}", setting)
    for kind in others:
        own = {n: s for n, s in class_args(kind).items() if shown.get(n) != s}
        yield from ["", f"Other with `--model={class_names(kind)[0]}`:"]
        for name, setting in own.items():
            yield from _setting(f"model.{name}", setting)


def _class(name: str, kind: Node) -> Iterator[str]:
    yield from _wrapped(f"{name}: {kind.get('description', '')}")
    for argument, node in class_args(kind).items():
        yield from _setting(argument, node, dashes="")


def class_names(kind: Node) -> list[str]:
    """Return all names of the class that a form of a value describes; none if it is no class."""
    return kind.get("properties", {}).get("class_path", {}).get("enum", [])


def settings_of(node: Node) -> Node:
    """Return the settings of a mapping by their names."""
    named = node.get("properties", {}).items()
    return {n: s for n, s in named if n != "$schema" and not n.endswith("+")}


def class_args(kind: Node) -> Node:
    """Return the arguments of a class by their names."""
    return settings_of(kind["properties"].get("init_args", {}))


def _setting(name: str, node: Node, dashes: str = "--") -> Iterator[str]:
    kinds = " or ".join(dict.fromkeys(_kinds(node)))
    default = f", default {node['default']}" if "default" in node else ""
    text = " ".join(node.get("description", "").replace("``", "`").split())
    return _item(f"{dashes}{name} ({kinds}{default})" if kinds else f"{dashes}{name}", text)


def _kinds(node: Node) -> Iterator[str]:
    for option in node.get("anyOf", [node]):
        if "$ref" in option:
            yield option["$ref"].rpartition("/")[2]
        elif "enum" in option:
            yield from map(str, option["enum"])
        elif "class_path" not in option.get("properties", {}):
            types = option.get("type", [])
            yield from (_WORDS[t] for t in ([types] if isinstance(types, str) else types))


def _item(head: str, text: str, indent: int = 6, beside: bool = False) -> Iterator[str]:
    """Yield a head and its text in lines, the text beside the head or below it."""
    start = f"  {head}" if beside else " " * indent
    if not beside:
        yield from _wrapped(head, initial_indent="  ", subsequent_indent=" " * 6)
    yield from _wrapped(text, initial_indent=start, subsequent_indent=" " * indent)


def _wrapped(text: str, **indents: str) -> list[str]:
    width = min(100, get_terminal_size((100, 24)).columns)
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, **whole, **indents)  # type: ignore[arg-type]
