"""Write the tables and the picture of `docs/results.md` from the measured figures."""

import re
from collections.abc import Callable

from benchmarks import results, seconds
from benchmarks.papers import main as papers

PAGE = results.ROOT / "docs/results.md"

TABLES: dict[str, Callable[[str, str], str]] = {
    "papers": papers.table_of_shape,
    "seconds": seconds.tables,
}


def filled(name: str, part: str) -> str:
    """Return a table with its source, from the CPU that has most figures of it."""
    cpu = results.most_measured(name, part)
    commits = dict.fromkeys(line["commit"] for line in results.read(name, cpu, part))
    source = f"{cpu}. `python -m benchmarks run {name}`, {', '.join(commits)}."
    return f"{TABLES[name](part, cpu)}\n\n{source}"


def page(text: str) -> str:
    """Return the page with the tables that the figures give now."""
    marked = re.compile(r"<!-- (\w+): ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
    return marked.sub(
        lambda m: f"<!-- {m[1]}: {m[2]} -->\n{filled(m[1], m[2])}\n<!-- end -->", text
    )


def write() -> None:
    """Write the page and draw its picture."""
    PAGE.write_text(page(PAGE.read_text()))
    cpus = {task: results.most_measured("seconds", task) for task in seconds.TASKS}
    seconds.draw({task: seconds.complete(task, cpu) for task, cpu in cpus.items()})
