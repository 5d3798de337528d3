"""Command line of the benchmarks: `python -m benchmarks list`, `python -m benchmarks run NAME`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.registry import BENCHMARKS
from benchmarks.results import recording

USAGE = """\
usage: python -m benchmarks list
       python -m benchmarks run NAME [arguments]     (--help lists them)
       python -m benchmarks page                     (writes docs/results.md and its picture)
Run it in the root of the repository."""


def table() -> str:
    """Return a line for each benchmark."""
    rows = [("name", "costs", "simulated", "shows")]
    rows += [(name, b.costs, b.simulated, b.shows) for name, b in BENCHMARKS.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code of the benchmark."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case ["list"]:
            print(table())
            return 0
        case ["page"]:
            import_module("benchmarks.page").write()
            return 0
        case ["run", name, *rest] if name in BENCHMARKS:
            module = import_module(BENCHMARKS[name].module or f"benchmarks.{name}")
            with recording(name) as file:
                before = file.stat().st_size if file.exists() else 0
                code = int(module.main(rest) or 0)
            if file.exists() and file.stat().st_size > before:
                print(f"figures: {file}", file=sys.stderr)
            return code
        case ["run", name, *_] if not name.startswith("-"):
            print(f"There is no benchmark `{name}`. Use one of {', '.join(BENCHMARKS)}.")
            return 2
        case ["-h" | "--help"]:
            print(USAGE)
            return 0
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
