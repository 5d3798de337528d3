"""The report of a run: one HTML file with charts, timelines and completions."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.report.collect import run_data
from lit_rlsched.callbacks.report.page import write_page

__all__ = ["FILE", "run_data", "write_report"]

FILE = "report.html"
"""Its name in the folder of a run."""


def write_report(path: str | Path, runs: Sequence[dict[str, Any]], going_on: bool = False) -> Path:
    """Write the report of runs.

    Args:
        path: File.
        runs: What `run_data` returns, of each run.
        going_on: Whether the run has not ended.
    """
    when = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    made = f"Made on {when}, while the run went on." if going_on else f"Made on {when}."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, runs, made)
    return path
