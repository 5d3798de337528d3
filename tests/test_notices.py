"""THIRD_PARTY_NOTICES.md names every dependency, with the licence of its metadata."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAMILIES = {
    "Apache": r"Apache",
    "BSD": r"\bBSD\b",
    "MIT": r"\bMIT\b",
    "MPL": r"\bMPL\b|Mozilla",
    "PSF": r"\bPSF\b|Python Software Foundation",
}


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(one for extra in extras for one in extra)]
    return sorted({re.match(r"[\w.-]+", one)[0] for one in requirements})


def families(text):
    return {name for name, pattern in FAMILIES.items() if re.search(pattern, text)}


def licence(package):
    about = metadata(package)
    if expression := about["License-Expression"]:
        return families(expression)
    classifiers = [c for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    found = families("\n".join(classifiers))
    text = about["License"] or distribution(package).read_text("licenses/LICENSE") or ""
    return found or families(text[:200])


NOTICES = {
    re.match(r"[\w.-]+", cells[0])[0]: cells[2]
    for line in (ROOT / "THIRD_PARTY_NOTICES.md").read_text().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 3
    and re.match(r"always|extra|development", cells[1])
}


def test_every_dependency_is_named_and_nothing_else():
    assert sorted(NOTICES) == declared()


@pytest.mark.parametrize("package", declared())
def test_its_licence_is_that_of_its_metadata(package):
    assert families(NOTICES[package])
    try:
        assert families(NOTICES[package]) == licence(package)
    except PackageNotFoundError:  # an extra, or vLLM's build for a CPU in place of the other
        pytest.skip(f"{package} is not installed")
