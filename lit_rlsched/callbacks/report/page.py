"""The report as one HTML file that needs no network."""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.report.collect import COMPARED
from lit_rlsched.callbacks.report.timelines import ENDS
from lit_rlsched.scheduling.trace_files import write_whole
from lit_rlsched.text import printable

FILE = "report.html"
"""Its name in the folder of a run."""
FORBIDDEN = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""Nothing is loaded from anywhere, and nothing is sent."""


def write_report(path: str | Path, runs: Sequence[dict[str, Any]], going_on: bool = False) -> Path:
    """Write the report of what `run_data` returns; a reader meanwhile sees the one before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = f"Made on {datetime.now():%Y-%m-%d %H:%M:%S}{', while the run went on' * going_on}."
    if len({run["name"] for run in runs}) < len(runs):
        runs = [{**run, "name": run["folder"]} for run in runs]
    data: dict[str, Any] = {"title": f"Report of {', '.join(run['name'] for run in runs)}"}
    many = len(runs) > 1
    data["verdict"] = " ".join(f"{run['name']}: " * many + run["verdict"] for run in runs)
    data |= {"made": made, "notes": notes(runs), "ends": ENDS, "runs": runs}
    text = json.dumps(printable(data), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    script = _own("page.js")
    digests = (hashlib.sha256(of.encode()).digest() for of in (plotly(), script))
    allowed = " ".join(f"'sha256-{base64.b64encode(of).decode()}'" for of in digests)
    parts = {
        "POLICY": f"{FORBIDDEN}; script-src {allowed}; style-src 'unsafe-inline'; img-src data:",
        "TITLE": html.escape(str(printable(data["title"]))),
        "STYLE": _own("page.css"),
        "DATA": base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode(),
        "PLOTLY": plotly(),
        "SCRIPT": script,
    }
    whole = re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _own("page.html"))
    write_whole(path, lambda at: at.write_text(whole, encoding="utf-8"))
    return path


def notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a reader must know before reading or comparing the runs."""
    said = [f"{run['name']}: {note}" for run in runs for note in run["notes"]]
    different = [
        word
        for name, word in COMPARED.items()
        if len({json.dumps(run["compared"][name]) for run in runs}) > 1
    ]
    if different:
        said.append(
            f"These runs have different {' and '.join(different)}: their rewards, accuracies, "
            "lengths and seconds depend on that, so do not compare them."
        )
    return said


@cache
def plotly() -> str:
    """Return plotly.js, which is in the Python package `plotly`."""
    text = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
