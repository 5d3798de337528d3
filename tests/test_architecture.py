"""docs/explanation/architecture.md is what the code is."""

import ast
import io
import re
import tokenize
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlsched import RolloutDataModule, callbacks
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.run.combinations import (
    COMBINATIONS,
    check,
)
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text()


@pytest.fixture
def facts():
    data = RolloutDataModule(
        [{"prompt": "p"}], len, engine=TransformersEngine(), prompts_per_round=4
    )
    return RunFacts(data.run.settings)


def section(name: str) -> str:
    return PAGE.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0].strip()


PAIRS = [row for row in COMBINATIONS if re.fullmatch(r"`\w+`", row.first + row.second[1:-1])]


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: f"{row.first}-{row.second}")
def test_pairs(row, facts):
    pair = {row.first.strip("`"), row.second.strip("`")}
    assert pair <= set(callbacks.__all__)
    names = frozenset({*pair, "RoundCheckpoint"})
    schedule = Schedule(FullRound(1))
    with pytest.raises(UsageError, match=f"{row.first} with {row.second}: .*"):
        check(schedule, replace(facts, callbacks=names))
    check(schedule, replace(facts, callbacks=names - {row.first.strip("`")}))


def systems() -> list[list[str]]:
    return [line.split("|")[3:-1] for line in section("systems").splitlines()[2:]]


def test_a_callback_that_inherits_from_another_counts_as_one(facts):
    class Mine(callbacks.SortedBatching):
        pass

    with pytest.raises(UsageError, match="`DynamicSampling` with `SortedBatching`"):
        make_schedule([Mine(), callbacks.DynamicSampling()], facts)


@pytest.mark.parametrize("turn", [1, -1])
def test_the_rule_is_set_once_whatever_callbacks_say_they_set(facts, turn):
    class Mine(callbacks.RolloutCallback):
        sets = "something else"

        def apply(self, schedule, facts):
            schedule.rule = FullRound(2)

    pair = [Mine(), callbacks.RolloutWindow()][::turn]
    with pytest.raises(UsageError, match=r"`\w+` with the rule `\w+`: Both decide when a round"):
        make_schedule(pair, facts)


def test_from_callbacks_to_a_rule_without_a_trainer(facts):
    schedule = make_schedule([callbacks.TailBatching(), callbacks.MicroGroupSampling(3)], facts)
    assert schedule.rule.launched(4) == 4 and schedule.rule.most_prompts() == 5
    assert schedule.slots.slots == 3


def test_every_file_that_the_table_of_systems_names_exists():
    assert len(systems()) >= 10
    for pure, helpers, callback, page in systems():
        for path in re.findall(r"`([\w/]+\.py)`", pure + helpers):
            assert (ROOT / "lit_rlsched" / path).exists(), path
        for name in re.findall(r"`(\w+)`", callback):
            assert name in callbacks.__all__, name
        assert (ROOT / "docs" / page.strip(" `")).is_file(), page


def test_every_switch_is_in_the_table_of_systems():
    """Whoever looks for what a switch does finds its files there."""
    named = {name for row in systems() for name in re.findall(r"`(\w+)`", row[2])}
    classes = [getattr(callbacks, name) for name in callbacks.__all__]
    assert named == {cls.__name__ for cls in classes if getattr(cls, "sets", None)}


def test_no_file_of_the_package_is_above_500_lines():
    for path in (ROOT / "lit_rlsched").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path


NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def size(source: str) -> dict[str, int]:
    """Lines, lines of code (neither blank, comment, docstring nor import) and functions."""
    tree, tokens = ast.parse(source), tokenize.generate_tokens(io.StringIO(source).readline)
    code = {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        text = text and isinstance(node.value.value, str)
        if text or isinstance(node, (ast.Import, ast.ImportFrom)):
            code -= {*range(node.lineno, node.end_lineno + 1)}
    lines = len(source.splitlines())
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return {"lines": lines, "code": len(code & {*range(lines + 1)}), "functions": len(functions)}


def test_the_package_keeps_its_budget():
    """It falls with what is removed, so that the room does not fill up again unseen."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["budget"]
    sizes = [size(path.read_text()) for path in (ROOT / "lit_rlsched").rglob("*.py")]
    has = {name: sum(one[name] for one in sizes) for name in sizes[0]} | {"files": len(sizes)}
    assert all(has[name] <= most for name, most in allowed.items()), (has, "[tool.budget]")
    assert all(has[name] > 0.99 * most - 1 for name, most in allowed.items()), "lower the budget"


def test_what_mutants_are_tried_with_is_there():
    mutmut = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    chosen = mutmut["pytest_add_cli_args_test_selection"]
    assert not [t for t in chosen if t[0] != "-" and not (ROOT / t.partition("::")[0]).exists()]
