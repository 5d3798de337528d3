"""What may import what: the layers of docs/explanation/architecture.md, read from the code."""

import ast
import subprocess
import sys

import pytest
from layers import MODULES, PACKAGE, PLACES, ROOT, circles, imports, place, purpose

FOLDERS = [name for name in PLACES if (PACKAGE / name).is_dir()]


def test_the_root_is_small() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert files | folders == {*PLACES}
    assert len(files) <= 11 and len(folders) <= 12


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_upward_in_the_table_only(module: str) -> None:
    """Imports for types and inside of functions too; the public names are lazy."""
    if module == "__init__":
        return
    above = {*PLACES[: PLACES.index(place(module)) + 1]}
    assert {place(name) for name in imports(module)} <= above


def test_no_module_imports_itself_through_others() -> None:
    assert circles(types=False) == []
    assert circles(types=True) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_is_for_and_what_it_imports(folder: str) -> None:
    _, said = purpose(folder)
    inside = [module for module in MODULES if place(module) == folder]
    assert said == {place(name) for module in inside for name in imports(module)} - {folder}


def test_the_pages_say_the_same() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    agents = (ROOT / "AGENTS.md").read_text()
    for folder in FOLDERS:
        sentence, _ = purpose(folder)
        assert f"| `{folder}/` | {sentence} |" in page
        assert f"* `lit_rlsched/{folder}`: {sentence}" in agents


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
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.types import Prompt, Sampling
engine = EnginePool([SimulatedEngine(length_only=True, stream=False) for _ in range(2)])
session = simulated_session(engine, 16, 201, lambda: Admission(8))
rule = TailRound(4, 2, 1.5)
visits = (Visit(Prompt(str(p), "", (1,)), str(p)) for p in count())
rounds = list(islice(simulated_rounds(session, visits, Sampling(200), 2, lambda n: rule), 6))
assert [len(drawn.trained) for drawn in rounds] == [4] * 6
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
