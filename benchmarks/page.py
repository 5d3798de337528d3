"""Write the tables and the picture of `docs/results.md` from the measured figures."""

import re
from collections.abc import Callable

from benchmarks import results, seconds
from benchmarks.papers import main as papers

PAGE = results.ROOT / "docs/results.md"

TABLES: dict[str, tuple[Callable[[str, str], str], int]] = {
    "papers": (papers.table_of_shape, 2),
    "seconds": (seconds.tables, 1),
}
"""What makes the tables of a CPU, and of how many CPUs the page shows them."""


def filled(name: str, part: str) -> str:
    """Return the tables with their sources, from the CPUs that have most figures of them."""
    make, most = TABLES[name]
    said = []
    for cpu in results.cpus(name, part)[:most]:
        if table := make(part, cpu):
            commits = dict.fromkeys(line["commit"] for line in results.read(name, cpu, part))
            source = f"{cpu}. `python -m benchmarks run {name}`, {', '.join(commits)}."
            said.append(f"{table}\n\n{source}")
    return "\n\n".join(said)


def page(text: str) -> str:
    """Return the page with the tables that the figures give now."""
    marked = re.compile(r"<!-- (\w+): ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
    return marked.sub(
        lambda m: f"<!-- {m[1]}: {m[2]} -->\n{filled(m[1], m[2])}\n<!-- end -->", text
    )


def write() -> None:
    """Write the page and draw its picture."""
    PAGE.write_text(page(PAGE.read_text()))
    cpus = {task: results.cpus("seconds", task)[0] for task in seconds.TASKS}
    seconds.draw({task: seconds.complete(task, cpu) for task, cpu in cpus.items()})
