"""Measured figures, appended to `benchmarks/results/NAME.csv` with one figure per line.

A benchmark reads its arguments with `parse` and adds each row of its table with `add`. Outside
`recording`, as in tests and in child processes of a benchmark, nothing is written.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("results")
COLUMNS = ("date", "commit", "cpu", "arguments", "row", "figure", "value")

_file: Path | None = None
_arguments = "{}"


@contextmanager
def recording(name: str) -> Iterator[Path]:
    """Write the figures that are added in this block to the file of this benchmark."""
    global _file, _arguments
    FOLDER.mkdir(parents=True, exist_ok=True)
    _file, _arguments = FOLDER / f"{name}.csv", "{}"
    try:
        yield _file
    finally:
        _file = None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keep the lines of the description and print defaults."""


MOST_EQUAL = 0.95
"""Share of prompts with equal rewards above which nothing is learned from a run."""


def check_rewards_differ(shares: Sequence[float], run: str) -> None:
    """Refuse a run in which nothing was learned, so that its update cost next to nothing.

    Args:
        shares: `frac_reward_zero_std` of each round.
        run: Name of the run, for the message.

    Raises:
        SystemExit: nearly no prompt had completions with different rewards.
    """
    if (equal := sum(shares) / len(shares)) > MOST_EQUAL:
        raise SystemExit(
            f"{run}: the completions of {equal:.0%} of the prompts had the same reward. Then an "
            "update has nothing to compute, and a comparison of seconds says nothing. Use a model "
            "and a task whose rewards differ."
        )


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a benchmark whose help is the docstring of its module."""
    return argparse.ArgumentParser(
        f"python -m benchmarks run {name}",
        description=doc,
        formatter_class=_HelpFormatter,
    )


def add_cases(
    parser: argparse.ArgumentParser, cases: Collection[str], option: str = "cases"
) -> None:
    """Add the option `--cases`, or another name, which by default is all of them."""
    parser.add_argument(
        f"--{option}",
        nargs="*",
        default=list(cases),
        choices=cases,
        metavar=option.removesuffix("s").upper(),
        help=f"{option} to run",
    )


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, model: str | None = None
) -> argparse.Namespace:
    """Read the arguments of a benchmark; they are written with each figure, including defaults."""
    global _arguments
    options: argparse.Namespace = parser.parse_args(arguments)
    if model and not Path(model).is_dir():
        parser.error(f"no model in {model}: run `make real-model`")
    _arguments = json.dumps(vars(options), default=str, sort_keys=True)
    return options


def add(row: object, figures: Mapping[str, object]) -> None:
    """Write the figures of one row of a table.

    Args:
        row: Name of the row, such as a schedule, a model or a seed.
        figures: Values by name, without units and signs.
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


def read(name: str, of_cpu: str | None = None, part: str = "") -> Iterator[dict[str, str]]:
    """Yield what all CPUs, or one, have written of the rows that this task or shape begins."""
    file = FOLDER / f"{name}.csv"
    if file.exists():
        with file.open(newline="") as opened:
            for line in csv.DictReader(opened):
                if of_cpu in (None, line["cpu"]) and line["row"].lstrip('["').startswith(part):
                    yield line


def cpus(name: str, part: str) -> list[str]:
    """Return the CPUs that have figures of a task or shape, those with most figures first."""
    counted = Counter(line["cpu"] for line in read(name, part=part))
    return [cpu for cpu, _ in counted.most_common()]


@cache
def commit() -> str:
    """Return the current commit and a hash of uncommitted changes; `unknown` without git."""
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
    """Return the CPU model and the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value for name, _, value in (line.partition(": ") for line in lines)}
    model = said.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in said and "model" in said:
        model += f" (family {said['cpu family']}, model {said['model']})"
    return f"{model}, {os.cpu_count()} cores"


def with_error(values: Sequence[float], digits: int) -> str:
    """Return the mean and its standard error, with this number of decimals."""
    mean = f"{fmean(values):,.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {stdev(values) / math.sqrt(len(values)):,.{digits}f}"
