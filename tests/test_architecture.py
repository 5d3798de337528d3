"""docs/explanation/architecture.md is what the code is."""

import re
from pathlib import Path

import pytest

from lit_rlsched import callbacks
from lit_rlsched.run.schedule import CHANGED, REFUSED, check_pairs, pairs_as_markdown
from lit_rlsched.settings import UsageError

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
    with pytest.raises(UsageError, match="`{}` with `{}`: .*".format(*pair)):
        check_pairs(names)
    check_pairs(names - {pair[0]})


def systems() -> list[list[str]]:
    return [line.split("|")[3:-1] for line in section("systems").splitlines()[2:]]


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


def test_every_switch_is_in_the_table_of_systems():
    """Whoever looks for what a switch does finds its files there."""
    named = {name for row in systems() for name in re.findall(r"`(\w+)`", row[2])}
    classes = [getattr(callbacks, name) for name in callbacks.__all__]
    assert named == {cls.__name__ for cls in classes if getattr(cls, "sets", None)}


def test_no_file_of_the_package_is_above_500_lines():
    for path in (ROOT / "lit_rlsched").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path
