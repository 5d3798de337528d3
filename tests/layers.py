"""What each file of the package imports of the package, read from the code."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_rlsched"
PLACES = (
    *("types", "_lazy", "settings", "text", "processes", "ranks"),
    *(
        "scheduling",
        "engines",
        "workers",
        "rewards",
        "data",
        "environments",
        "rollout",
        "training",
        "simulation",
    ),
    "run",
    *("callbacks", "datamodule", "module", "trl", "cli", "__init__", "__main__"),
)
"""Files and folders of the root. Each imports those before it at most."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def imports(module: str, types: bool = True) -> set[str]:
    """Modules that a module imports, also inside of functions.

    Args:
        module: Its name inside the package.
        types: Whether imports for type checking count.
    """
    tree = ast.parse(MODULES[module].read_text())
    nodes = list(ast.walk(tree))
    skipped: set[ast.AST] = set()
    if not types:
        checks = (n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))
        skipped = {inner for node in checks for inner in ast.walk(node)}
    return {name for node in nodes if node not in skipped for name in _imported(node)} - {module}


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
        base = str(node.module).partition(".")[2]
        for alias in node.names:
            full = f"{base}.{alias.name}".strip(".")
            if full in MODULES or base:
                yield full if full in MODULES else base
            elif alias.name != "__version__":  # which is set before anything is imported
                yield "__init__"


def purpose(of: str) -> tuple[str, set[str]]:
    """Return the first sentence of a place's docstring, and what it says that the place imports."""
    path = MODULES[of]
    docstring = str(ast.get_docstring(ast.parse(path.read_text())))
    said = re.search(r"^Imports (.*)\.$", docstring, re.M | re.S)
    return docstring.splitlines()[0], set(re.findall(r"`(\w+)`", said[1] if said else ""))


def circles(types: bool) -> list[list[str]]:
    """Return modules that import each other, by Tarjan's algorithm."""
    arrows = {module: imports(module, types) for module in MODULES}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in arrows[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found.append(sorted(members))

    for module in MODULES:
        if module not in index:
            visit(module)
    return found
