"""The report as one HTML file that needs no network."""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.report.collect import COMPARED
from lit_rlsched.callbacks.report.timelines import ENDS
from lit_rlsched.run.saving.run_folder import names_of
from lit_rlsched.scheduling.trace_files import write_whole
from lit_rlsched.text import printable

FORBIDDEN = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""Nothing is loaded from anywhere, and nothing is sent."""
MOST_BYTES = 10_000_000
"""Size of a page."""


def write_page(path: Path, runs: Sequence[dict[str, Any]], made: str) -> None:
    """Write the page; whoever reads the file meanwhile sees the one before."""
    names = names_of([Path(run["folder"]) for run in runs])
    runs = [{**run, "name": name} for run, name in zip(runs, names, strict=True)]
    data: dict[str, Any] = {"title": f"Report of {', '.join(names)}"}
    data |= {"made": made, "notes": notes(runs), "ends": ENDS, "runs": runs}
    script = _own("page.js")
    allowed = " ".join(f"'sha256-{_digest(of)}'" for of in (plotly(), script))
    parts = {
        "POLICY": f"{FORBIDDEN}; script-src {allowed}; style-src 'unsafe-inline'; img-src data:",
        "TITLE": html.escape(str(printable(data["title"]))),
        "STYLE": _own("page.css"),
        "DATA": _packed(data, MOST_BYTES - len(plotly()) - len(script)),
        "PLOTLY": plotly(),
        "SCRIPT": script,
    }
    pieces = _own("page.html").split("{{")
    whole = pieces[0]
    for piece in pieces[1:]:
        name, _, after = piece.partition("}}")
        whole += parts[name] + after
    write_whole(path, lambda at: at.write_text(whole, encoding="utf-8"))


def _packed(data: dict[str, Any], most: int) -> str:
    """Return the data as text, without every second timeline and completion until it fits."""
    while True:
        text = json.dumps(
            printable(data), separators=(",", ":"), allow_nan=False, ensure_ascii=False
        )
        packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
        runs = [run for run in data["runs"] if run["timelines"] or run["completions"]["rows"]]
        if len(packed) <= most or not runs:
            return packed
        for run in runs:
            timelines, rows = run["timelines"], run["completions"]["rows"]
            run["timelines"] = timelines[::-2][::-1] if len(timelines) > 1 else []
            half = rows[1::2]
            run["completions"] = {**run["completions"], "rows": half, "shown": len(half)}


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


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
