"""Every benchmark that is listed starts, and counts have not become worse."""

import ast
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import counts
from benchmarks.registry import BENCHMARKS

ROOT = Path(__file__).parents[1]


def test_every_module_with_a_main_is_listed(capsys):
    files = {name: b.module or f"benchmarks.{name}" for name, b in BENCHMARKS.items()}
    mains = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    }
    assert mains - {"benchmarks.__main__"} == set(files.values())
    assert runner.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *BENCHMARKS]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_starts(name, capsys):
    with pytest.raises(SystemExit) as ended:
        runner.main(["run", name, "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [(["run", "nothing"], "counts"), ([], "usage")])
def test_what_is_not_there_is_refused(capsys, arguments, said):
    assert runner.main(arguments) == 2
    assert said in "".join(capsys.readouterr())


def test_nothing_is_counted_worse_than_recorded(capsys):
    assert counts.main(["--parts", "schedules", "update", "head"]) == 0, capsys.readouterr().out
