"""What may import what: the layers of docs/explanation/architecture.md, read from the code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lit_rlsched"

BASE = [
    "types",
    "settings",
    "trl_names",
    "init_args",
    "sizes",
    "text",
    "refusals",
    "processes",
    "_lazy",
    "_malloc",
    "_environment",
    "logs",
    "interrupts",
    "gpu_setup",
    "hooks",
    "lora",
    "policy",
    "precision",
    "platforms",
    "team",
    "sharding",
]
"""Single modules at the bottom: they import nothing of the package but each other."""
LAYERS = ("scheduling", "engines", "rewards", "data", "rollout", "simulate", "training")
"""Folders, from the bottom to the top. Each may import those before it, and the base."""


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports when it runs, type checking apart."""
    tree, found = ast.parse(path.read_text()), set()
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in (node.module, *names) if name.startswith("lit_rlsched.")}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("lit_rlsched.")}
    return {name.split(".")[1] for name in found}


def files() -> list[Path]:
    return [p for layer in LAYERS for p in sorted((PACKAGE / layer).rglob("*.py"))]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    allowed = {*BASE, *LAYERS[: LAYERS.index(layer) + 1]}
    modules = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert imports(path) & modules <= allowed | {"__init__", "__version__"}


def test_the_base_stands_alone() -> None:
    for name in BASE:
        assert imports(PACKAGE / f"{name}.py") <= {*BASE, "__version__"}, name


PURE = """
import importlib, pkgutil, sys
import lit_rlsched.scheduling as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"lit_rlsched.scheduling.{module.name}")
from itertools import count, islice
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.simulate.rounds import Visit, simulated_rounds, simulated_session
from lit_rlsched.types import Prompt, Sampling
engine = EnginePool([SimulatedEngine(length_only=True, stream=False) for _ in range(2)])
session = simulated_session(engine, 16, 201, lambda: Admission(8))
rule = TailRound(4, 2, 1.5)
visits = (Visit(Prompt(str(p), "", (1,)), str(p)) for p in count())
rounds = list(islice(simulated_rounds(session, visits, Sampling(200), 2, lambda n: rule), 6))
assert [len(drawn.harvest.trained) for drawn in rounds] == [4] * 6
heavy = {"torch", "transformers", "lightning", "torchmetrics", "vllm", "pyarrow"}
print(*sorted(heavy & sys.modules.keys()))
"""


def test_scheduling_and_the_simulated_round_loop_import_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", PURE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not run.stdout.split()


def test_the_package_does_not_know_the_benchmarks() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "benchmarks" for name in names), path
