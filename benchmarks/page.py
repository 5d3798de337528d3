"""Write the tables of `docs/results.md` from the measured figures: `python -m benchmarks page`."""

import csv
import re
from collections.abc import Callable

from benchmarks import results, seconds
from benchmarks.papers import main as papers

PAGE = results.ROOT / "docs/results.md"


def _seconds(task: str, cpu: str) -> str:
    return seconds.table(runs) if (runs := seconds.complete(task, cpu)) else ""


TABLES: dict[str, Callable[[str, str], str]] = {
    "papers": papers.table_of_shape,
    "seconds": _seconds,
}


def filled(name: str, part: str) -> str:
    """Return a table with its source, from the CPU that has most rows of it."""
    with (results.FOLDER / f"{name}.csv").open(newline="") as file:
        lines = [*csv.DictReader(file)]
    made = {cpu: TABLES[name](part, cpu) for cpu in dict.fromkeys(line["cpu"] for line in lines)}
    cpu = max(made, key=lambda cpu: made[cpu].count("\n"))
    commits = dict.fromkeys(
        line["commit"] for line in lines if line["cpu"] == cpu and part in line["row"]
    )
    return f"{made[cpu]}\n\n{cpu}. `python -m benchmarks run {name}`, {', '.join(commits)}."


def page(text: str) -> str:
    """Return the page with the tables that the figures give now."""
    marked = re.compile(r"<!-- (\w+): ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
    return marked.sub(
        lambda m: f"<!-- {m[1]}: {m[2]} -->\n{filled(m[1], m[2])}\n<!-- end -->", text
    )


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text()))
