"""docs/explanation/architecture.md is what the code is."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_rlsched import callbacks
from lit_rlsched.run.schedule import CHANGED, REFUSED, RunFacts, check_pairs, pairs_as_markdown

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text()


def section(name: str) -> str:
    return PAGE.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0].strip()


def test_the_table_of_pairs_is_that_of_the_code():
    assert section("pairs") == pairs_as_markdown()


@pytest.mark.parametrize("pair", [*REFUSED, *CHANGED], ids="-".join)
def test_pairs(pair):
    assert set(pair) <= set(callbacks.__all__)
    names = {*pair, "RoundCheckpoint"}
    if pair in CHANGED:
        return check_pairs(names)
    with pytest.raises(ValueError, match="`{}` with `{}`: .*".format(*pair)):
        check_pairs(names)
    check_pairs(names - {pair[0]})


def systems() -> list[list[str]]:
    return [line.split("|")[3:-1] for line in section("systems").splitlines()[2:]]


def test_a_callback_that_inherits_from_another_counts_as_one():
    class Mine(callbacks.SortedBatching):
        pass

    data = SimpleNamespace(
        **dict.fromkeys(("prompts_per_round", "num_generations", "steps_per_round"), 1),
        **dict.fromkeys(("num_iterations", "sampling", "engine"), 1),
        run=SimpleNamespace(learner=None),
        trainer=SimpleNamespace(callbacks=[Mine(), callbacks.DynamicSampling()]),
    )
    with pytest.raises(ValueError, match="`DynamicSampling` with `SortedBatching`"):
        check_pairs(RunFacts.of(data).callbacks)


def test_every_file_that_the_table_of_systems_names_exists():
    assert len(systems()) >= 10
    for pure, helpers, callback, config, page, tests in systems():
        for path in re.findall(r"`([\w/]+\.py)`", pure + helpers):
            assert (ROOT / "lit_rlsched" / path).exists(), path
        for name in re.findall(r"`(\w+)`", callback):
            assert name in callbacks.__all__, name
        for folder, cell in (("configs", config), ("docs", page), (".", tests)):
            for path in re.findall(r"`([\w/.]+)`", cell):
                assert (ROOT / folder / path).exists(), path


def test_a_system_is_a_pure_file_and_a_callback_of_its_name():
    """Both short, so that with two helpers at most it is read in one go."""
    for pure, helpers, callback, *_ in systems():
        (path,) = re.findall(r"`([\w/]+\.py)`", pure)
        assert len((ROOT / "lit_rlsched" / path).read_text().splitlines()) <= 200, path
        assert helpers.count(".py") <= 2, path
        for name in re.findall(r"`(\w+)`", callback):
            file = Path(inspect.getfile(getattr(callbacks, name)))
            assert file.name == Path(path).name
            assert code_lines(file) <= 80, file


def code_lines(path: Path) -> int:
    """Lines of code, without docstrings, comments and empty lines."""
    text = path.read_text()
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    code = (n for n, line in lines if line.strip() and not line.strip().startswith("#"))
    return len(set(code) - told)


def test_no_file_of_the_package_is_above_500_lines():
    for path in (ROOT / "lit_rlsched").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path


def test_the_layers_are_those_that_are_tested():
    folders = {p.name for p in (ROOT / "lit_rlsched").iterdir() if (p / "__init__.py").exists()}
    named = set(re.findall(r"^\| `(\w+)/`", PAGE, re.M)) | {"callbacks", "estimate"}
    assert folders - {"benchmark"} == named
