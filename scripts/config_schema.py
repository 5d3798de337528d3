"""Write the JSON Schema of configuration files: `python scripts/config_schema.py`.

jsonargparse derives it from the parser of `lit-rlsched`. What is added here: classes may be named
without their module, `KEY+` appends to a list, overlays need not repeat required settings, and a
reward function may be an object. `x-commands` has what each command takes besides: the help and the
quick answers of `lit-rlsched` come from this file.
"""

import json
from pathlib import Path
from typing import Any

from jsonargparse import capture_parser
from jsonargparse._completions_jsonschema import ParserJsonschema, anyof_schema
from jsonargparse._typehints import get_all_subclass_paths
from jsonargparse._util import import_object
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers

import lit_rlsched
from lit_rlsched import callbacks, engines, rewards
from lit_rlsched.cli import main as cli
from lit_rlsched.cli.help import SHARED

FILE = Path(__file__).parents[1] / "lit_rlsched/lit-rlsched.schema.json"
PUBLIC = (lit_rlsched, callbacks, engines, rewards, lightning_callbacks, loggers)
"""Packages whose classes a configuration may name without their module, or by `PACKAGE.NAME`."""


class ConfigSchema(ParserJsonschema):
    """JSON Schema that describes the arguments of the classes that configurations mostly name."""

    def class_ref(self, class_type: Any, action: Any, subclass: bool) -> dict[str, Any]:
        """Accept anything for a class of another library."""
        ours = class_type.__module__.startswith(("lit_rlsched", "lightning"))
        return super().class_ref(class_type, action, subclass) if ours else {}

    def subclass_def(self, class_type: Any, action: Any) -> dict[str, Any]:
        """Accept a known class with its arguments, or any other class by its import path."""
        known = [path for path in subclasses(class_type) if is_described(path)]
        return self.objects(known, action)

    def callable_schema(self, typehint: Any, action: Any) -> dict[str, Any]:
        """Accept a function by its import path, or an object that can be called."""
        return self.objects([], action)

    def objects(self, paths: Any, action: Any) -> dict[str, Any]:
        described = [self.class_path_schema(path, action) for path in paths]
        for schema in described:
            schema["properties"]["class_path"] = {"enum": names(schema.pop("path"))}
        taken = [name for s in described for name in s["properties"]["class_path"]["enum"]]
        other = self.unknown_class_path_schema()
        other["properties"]["class_path"] |= {"pattern": r"\w\.\w", "not": {"enum": taken}}
        return anyof_schema([{"type": "string"}, *described, other])

    def class_path_schema(self, class_path: str, action: Any) -> dict[str, Any]:
        return super().class_path_schema(class_path, action) | {"path": class_path}


def subclasses(class_type: Any) -> list[str]:
    try:
        return get_all_subclass_paths(class_type)
    except TypeError:  # a metaclass
        return []


def is_described(path: str) -> bool:
    """Return whether the arguments of a class stand in the schema."""
    cls = import_object(path)
    lightning = cls.__module__.startswith("lightning.")
    listed = any(cls.__name__ in package.__all__ for package in PUBLIC)
    helper = cls.__module__.startswith(("lit_rlsched.data", "lit_rlsched.scheduling"))
    return listed or (helper and not lightning and not cls.__name__.startswith("_"))


def names(path: str) -> list[str]:
    """Return all that a configuration may write as the class path of a class."""
    cls = import_object(path)
    packages = [p.__name__ for p in PUBLIC if cls.__name__ in p.__all__]
    homes = [cls.__module__, *packages]
    return [cls.__name__, *dict.fromkeys(f"{home}.{cls.__name__}" for home in homes)]


def add_append_keys(schema: dict[str, Any]) -> None:
    """Let `KEY+` append to the list `KEY` in an object and the objects below it."""
    for key, value in list(schema.get("properties", {}).items()):
        if any(option.get("type") == "array" for option in (value, *value.get("anyOf", []))):
            schema["properties"][f"{key}+"] = value
        add_append_keys(value)


def drop_machine_paths(schema: Any) -> None:
    """Remove defaults that are absolute paths: they are those of this machine."""
    if isinstance(schema, dict):
        if isinstance(default := schema.get("default"), str) and Path(default).is_absolute():
            del schema["default"]
        for value in schema.values():
            drop_machine_paths(value)
    elif isinstance(schema, list):
        for value in schema:
            drop_machine_paths(value)


def config_schema() -> dict[str, Any]:
    """Return the schema of a file for `lit-rlsched COMMAND --config`."""
    parser = capture_parser(cli.main)
    whole = ConfigSchema().generate(parser)
    settings: dict[str, Any] = {}
    commands: dict[str, Any] = {}
    for name in whole["properties"]["subcommand"]["enum"]:
        command = whole["properties"][name]
        command["properties"].pop("==SUPPRESS==")  # `--debug`
        known = {n: node for n, node in command["properties"].items() if node}  # heeded ones
        run = "trainer" in known
        if run:  # a file may serve several commands
            settings = known | settings
        besides = ("$schema", *SHARED) if run else ("$schema",)
        options = {n: node for n, node in known.items() if n not in besides}
        actions = parser._subcommands_action._name_parser_map[name]._actions
        commands[name] = {
            "description": command["description"],
            "run": run,
            "arguments": [action.dest for action in actions if not action.option_strings],
            "options": options,
        }
    schema = {
        "$schema": whole["$schema"],
        "title": "Configuration of lit-rlsched",
        "type": "object",
        "additionalProperties": False,
        "properties": settings,
        "x-commands": commands,
        "$defs": whole["$defs"],
    }
    for part in ("model", "data", "trainer"):  # an overlay sets a part of them
        settings[part].pop("required", None)
        add_append_keys(settings[part])
    for choice in schema["$defs"]["LightningModule"]["anyOf"]:
        choice.pop("required", None)
        choice.get("properties", {}).get("init_args", {}).pop("required", None)
    settings["model"]["description"] = cli.TITLES["model"]
    drop_machine_paths(schema)
    return schema


if __name__ == "__main__":
    FILE.write_text(json.dumps(config_schema(), indent=1) + "\n", encoding="utf-8")
