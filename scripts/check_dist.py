"""Check what an sdist and a wheel hold: `python scripts/check_dist.py dist`."""

import sys
import tarfile
import zipfile
from pathlib import Path

SDIST = (
    *("LICENSE", "THIRD_PARTY_NOTICES.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("CITATION.cff", "SECURITY.md", "Makefile", "pyproject.toml", "requirements/cpu.txt"),
    *("configs/quickstart.yaml", "docs/explanation/reliability.md", "examples/grpo_loop.py"),
    *("examples/countdown/model/model.safetensors", "tests/conftest.py", "tests/test_module.py"),
    *("lit_rlsched/module.py", "lit_rlsched/py.typed"),
    *("benchmarks/__main__.py", "benchmarks/counts.json"),
)
"""Some of each kind of file that it must hold."""
WHEEL = ("lit_rlsched/module.py", "lit_rlsched/py.typed", "lit_rlsched/lit-rlsched.schema.json")


def problems(sdist: set[str], wheel: set[str]) -> list[str]:
    """What they lack or hold too much, by the names of their files, an sdist's without its root."""
    found = [f"the sdist lacks {name}" for name in SDIST if name not in sdist]
    whole = {*WHEEL, *(name for name in sdist if name.startswith("lit_rlsched/"))}
    found += [f"the wheel lacks {name}" for name in sorted(whole - wheel)]
    licences = {name.rpartition("/")[2] for name in wheel if "/licenses/" in name}
    found += [
        f"the wheel lacks {n}" for n in ("LICENSE", "THIRD_PARTY_NOTICES.md") if n not in licences
    ]
    for name in sorted(wheel):
        folder, _, rest = name.partition("/")
        if folder != "lit_rlsched" and not folder.endswith(".dist-info"):
            found.append(f"the wheel holds {name}, which is not of the package")
        if rest.startswith("tests/") or rest.rpartition("/")[2].startswith("test_"):
            found.append(f"the wheel holds a test, {name}")
    for name in sorted(sdist | wheel):
        if name.endswith(".pyc") or name.startswith(("runs/", ".venv")):
            found.append(f"{name} is not source")
    return found


def main(folder: str) -> int:
    """Print what is wrong; the number of it."""
    (sdist,), (wheel,) = Path(folder).glob("*.tar.gz"), Path(folder).glob("*.whl")
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        inside = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
        found = problems(inside, set(archive.namelist()))
        print(f"{sdist.name}: {len(inside)} files; {wheel.name}: {len(archive.namelist())}")
    print(*found or ["both hold what they should"], sep="\n")
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
