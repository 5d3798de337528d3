"""Configuration files: what of a file in YAML is no configuration."""

from pathlib import Path
from typing import Any

import yaml

from lit_rlsched.settings import did_you_mean


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


def read(given: str) -> tuple[dict[str, Any], str]:
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
