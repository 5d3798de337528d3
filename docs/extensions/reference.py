"""Sphinx extension that writes the reference from the code.

A line `<!-- settings: MODULE -->`, `<!-- api: MODULE -->`, `<!-- commands -->` or
`<!-- combinations -->` of a page is replaced by the settings or the documentation of the public
names of a module, by the options of the command line, or by what is refused.
"""

import inspect
import re
from argparse import ArgumentParser
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import jsonargparse
from lightning import LightningDataModule, LightningModule
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

from lit_rlsched.cli import main as cli
from lit_rlsched.run.combinations import combinations_as_markdown


def public(module: str) -> dict[str, Any]:
    """Return the objects in `__all__` of a module that have documentation of their own."""
    home = import_module(module)
    return {name: getattr(home, name) for name in home.__all__ if not name.startswith("_")}


def settings(module: str) -> str:
    """Return a section for each class of a module, with an entry for each constructor argument."""
    sections = []
    for name, cls in public(module).items():
        if not inspect.isclass(cls) or is_dataclass(cls):  # nothing that a configuration names
            continue
        parser = jsonargparse.ArgumentParser()
        parser.add_class_arguments(cls, fail_untyped=False)
        actions = [a for a in parser._actions if not a.dest.endswith("help")]
        entries = [entry(name, action) for action in actions]
        first = inspect.getdoc(cls).partition("\n")[0]
        nothing = "" if entries else "\nIt has no settings.\n"
        sections.append(f"### {name}\n\n{first}\n{nothing}\n" + "\n".join(entries))
    return "\n".join(sections)


def entry(owner: str, action: Any) -> str:
    """Return one setting: name, type, default and the description from the docstring."""
    kind = readable(getattr(action, "_typehint", None) or action.type)
    default = "required" if action.required else f"`{action.default!r}`"
    return (
        f"````{{confval}} {owner}.{action.dest}\n:type: `{kind}`\n:default: {default}\n\n"
        f"{str(action.help).replace('%%', '%')}\n````\n"
    )


def readable(annotation: Any) -> str:
    """Return a type without the modules of its names."""
    return re.sub(r"~?\b(?:\w+\.)+(\w+)", r"\1", stringify_annotation(annotation))


def api(module: str) -> str:
    """Return `autodoc` directives for the public names of a module."""
    lines = []
    names = public(module)
    for name in sorted(names, key=lambda name: (not is_lightning(names[name]), name)):
        value = names[name]
        kind = "class" if inspect.isclass(value) else "function"
        lines += [f".. auto{kind}:: {value.__module__}.{name}"]
        lines += ["   :members:", "   :show-inheritance:", ""] if kind == "class" else [""]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def is_lightning(value: Any) -> bool:
    """Return whether an object is a class that the Trainer is given: these come first."""
    return inspect.isclass(value) and issubclass(value, (LightningModule, LightningDataModule))


def commands() -> str:
    """Return what each command does, and its options except those of `model`, `data`, `trainer`."""
    parser = jsonargparse.capture_parser(cli.main)
    (action,) = (a for a in parser._actions if hasattr(a, "_name_parser_map"))
    return "\n".join(command(name, sub) for name, sub in action._name_parser_map.items())


def command(name: str, parser: ArgumentParser) -> str:
    """Return the section of one command."""
    lines = [f"## lit-rlsched {name}", "", str(parser.description), ""]
    for option in parser._actions:
        group = option.dest.partition(".")[0]
        if option.option_strings and group not in ("model", "data", "trainer"):
            names = ", ".join(f"`{string}`" for string in option.option_strings)
            lines.append(f"{names}\n: {option.help or ''}\n")
    return "\n".join(lines)


def expand(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the marked lines of a page."""
    makers = {
        "settings": settings,
        "api": api,
        "commands": commands,
        "combinations": combinations_as_markdown,
    }
    source[0] = re.sub(
        rf"^<!-- ({'|'.join(makers)})(?:: ([\w.]+))? -->$",
        lambda match: makers[match[1]](*filter(None, [match[2]])),
        source[0],
        flags=re.MULTILINE,
    )


_HIDDEN = "\N{MODIFIER LETTER COLON}"


def hide_colon(app: Sphinx, what: str, *rest: Any) -> None:
    """Hide the colons in an attribute's first line, before which napoleon expects a type."""
    lines: list[str] = rest[-1]
    if what in ("attribute", "data", "property"):
        lines[:1] = [line.replace(":", _HIDDEN) for line in lines[:1]]


def show_colon(app: Sphinx, what: str, *rest: Any) -> None:
    """Show them again."""
    lines: list[str] = rest[-1]
    lines[:1] = [line.replace(_HIDDEN, ":") for line in lines[:1]]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", expand)
    app.connect("autodoc-process-docstring", hide_colon, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", show_colon, priority=600)
    return {"parallel_read_safe": True}
