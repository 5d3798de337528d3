"""Measured figures, appended to `benchmarks/results/NAME.csv`: one figure a line.

A benchmark says what it was run with (`parse`) and each row of its table (`add`). Both do nothing
but parse where nobody records, as in tests and in the processes that a benchmark starts.
"""

import argparse
import csv
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("results")
COLUMNS = ("date", "commit", "cpu", "arguments", "row", "figure", "value")

_file: Path | None = None
_arguments = "{}"


@contextmanager
def recording(name: str) -> Iterator[Path]:
    """Append what is added inside to the file of the benchmark of this name."""
    global _file, _arguments
    FOLDER.mkdir(parents=True, exist_ok=True)
    _file, _arguments = FOLDER / f"{name}.csv", "{}"
    try:
        yield _file
    finally:
        _file = None


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark's command line, with its module's text as the help."""
    return argparse.ArgumentParser(
        f"python -m benchmarks run {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read a benchmark's command line; every figure is written with it, defaults and seeds too."""
    global _arguments
    options = parser.parse_args(arguments)
    _arguments = json.dumps(vars(options), default=str, sort_keys=True)
    return options


def add(row: object, figures: Mapping[str, object]) -> None:
    """Write the figures of one row of a table.

    Args:
        row: What they are of: a schedule, a model, a seed.
        figures: Values by the name of the figure, without units and signs.
    """
    if _file is None:
        return
    new = not _file.exists()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with _file.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        same = (now, commit(), cpu(), _arguments, str(row))
        writer.writerows([*same, name, value] for name, value in figures.items())


@cache
def commit() -> str:
    """The commit that runs, with a hash of what has been changed since; `unknown` without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD").decode().strip()
        changes = _git("diff", "HEAD", "--", "*.py", "*.yaml")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (f"+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    ).stdout


@cache
def cpu() -> str:
    """Model and number of the machine's cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value for name, _, value in (line.partition(": ") for line in lines)}
    model = said.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in said and "model" in said:
        model += f" (family {said['cpu family']}, model {said['model']})"
    return f"{model}, {os.cpu_count()} cores"
