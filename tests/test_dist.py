"""What `make dist` refuses, and that the version is said once."""

import importlib.util
import re
import tomllib
from pathlib import Path

import lit_rlsched

ROOT = Path(__file__).parents[1]
PATH = ROOT / "scripts" / "check_dist.py"
spec = importlib.util.spec_from_file_location("check_dist", PATH)
check_dist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_dist)

LICENCES = {f"p.dist-info/licenses/{name}" for name in ("LICENSE", "THIRD_PARTY_NOTICES.md")}


def test_what_a_distribution_lacks_or_has_too_much():
    sdist, wheel = set(check_dist.SDIST), {*check_dist.WHEEL, *LICENCES}
    assert check_dist.problems(sdist, wheel) == []
    assert check_dist.problems(sdist - {"SECURITY.md"}, wheel) == ["the sdist lacks SECURITY.md"]
    assert check_dist.problems(sdist, wheel - LICENCES) == [
        "the wheel lacks LICENSE",
        "the wheel lacks THIRD_PARTY_NOTICES.md",
    ]
    (typed,) = check_dist.problems(sdist, wheel - {"lit_rlsched/py.typed"})
    assert typed == "the wheel lacks lit_rlsched/py.typed"
    for more in ("tests/test_module.py", "lit_rlsched/tests/conftest.py", "lit_rlsched/test_a.py"):
        (found, *_) = check_dist.problems(sdist, {*wheel, more})
        assert more in found
    (found,) = check_dist.problems({*sdist, "tests/a.pyc"}, wheel)
    assert found == "tests/a.pyc is not source"


def test_what_it_looks_for_is_there():
    assert all((ROOT / name).is_file() for name in {*check_dist.SDIST, *check_dist.WHEEL})


def test_data_files_of_the_package_are_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    (patterns,) = patterns["package-data"].values()
    for path in (ROOT / "lit_rlsched").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            inside = path.relative_to(ROOT / "lit_rlsched")
            depth = len(inside.parts)
            found = (p for p in patterns if inside.match(p) and p.count("/") == depth - 1)
            assert any(found), f"{path}: no pattern reaches it"
    sdist = {*check_dist.SDIST, "lit_rlsched/trl_names.csv"}
    (found,) = check_dist.problems(sdist, {*check_dist.WHEEL, *LICENCES})
    assert found == "the wheel lacks lit_rlsched/trl_names.csv"


def test_the_version_is_said_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "lit_rlsched.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", lit_rlsched.__version__)
