"""docs/architecture.md is what the code is."""

import re
from pathlib import Path

import pytest

from lit_rlsched import callbacks
from lit_rlsched.schedule import PAIRS, check_pairs, pairs_as_markdown

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


def section(name: str) -> str:
    return PAGE.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0].strip()


def test_the_table_of_what_goes_together_is_the_code_s():
    assert section("pairs") == pairs_as_markdown()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.first}-{pair.second}")
def test_pairs(pair):
    assert pair.first in callbacks.__all__ and pair.second in callbacks.__all__
    names = {pair.first, pair.second, "RoundCheckpoint"}
    if not pair.refused:
        return check_pairs(names)
    with pytest.raises(ValueError, match=f"`{pair.first}` with `{pair.second}`: .*"):
        check_pairs(names)
    check_pairs(names - {pair.first})


def test_every_file_that_the_table_of_systems_names_exists():
    rows = [line.split("|")[3:-1] for line in section("systems").splitlines()[2:]]
    assert len(rows) >= 10
    for pure, callback, config, page, tests in rows:
        for path in re.findall(r"`([\w/]+\.py)`", pure):
            assert (ROOT / "lit_rlsched" / path).exists(), path
        for name in re.findall(r"`(\w+)`", callback):
            assert name in callbacks.__all__, name
        for folder, cell in (("configs", config), ("docs", page), (".", tests)):
            for path in re.findall(r"`([\w/.]+)`", cell):
                assert (ROOT / folder / path).exists(), path


def test_the_layers_are_those_that_are_tested():
    folders = {p.name for p in (ROOT / "lit_rlsched").iterdir() if (p / "__init__.py").exists()}
    named = set(re.findall(r"^\| `(\w+)/`", PAGE, re.M)) | {"callbacks", "estimate"}
    assert folders - {"benchmark"} == named
