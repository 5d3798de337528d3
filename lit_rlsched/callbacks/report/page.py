"""The report as one HTML file that needs no network."""

import base64
import gzip
import hashlib
import html
import json
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.report.collect import ENDS
from lit_rlsched.text import printable

FORBIDDEN = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""Nothing is loaded from anywhere, and nothing is sent."""


def write_page(path: Path, runs: Sequence[dict[str, Any]], made: str) -> None:
    """Write the page; whoever reads the file meanwhile sees the one before.

    Args:
        path: File.
        runs: What `run_data` returns, of each run.
        made: A sentence about when the report was made.
    """
    names = ", ".join(run["name"] for run in runs)
    data: dict[str, Any] = {"title": f"Report of {names}", "made": made, "notes": notes(runs)}
    data |= {"ends": ENDS, "runs": [*runs]}
    text = json.dumps(printable(data), separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    script = _own("page.js")
    allowed = " ".join(f"'sha256-{_digest(of)}'" for of in (plotly(), script))
    parts = {
        "POLICY": f"{FORBIDDEN}; script-src {allowed}; style-src 'unsafe-inline'; img-src data:",
        "TITLE": html.escape(str(printable(data["title"]))),
        "STYLE": _own("page.css"),
        "DATA": packed,
        "PLOTLY": plotly(),
        "SCRIPT": script,
    }
    pieces = _own("page.html").split("{{")
    whole = pieces[0]
    for piece in pieces[1:]:
        name, _, after = piece.partition("}}")
        whole += parts[name] + after
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(whole, encoding="utf-8")
    os.replace(unfinished, path)


def notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a reader must know before comparing the runs."""
    said = []
    words = {"model": "models", "reward_funcs": "reward functions", "tokenizer": "tokenizers"}
    different = [
        word
        for name, word in words.items()
        if len({json.dumps(run["compared"][name]) for run in runs}) > 1
    ]
    if "reward functions" in different:
        said.append(
            "These runs have different reward functions: their rewards and accuracies cannot be "
            "compared."
        )
    if others := [word for word in different if word != "reward functions"]:
        said.append(
            f"These runs have different {' and '.join(others)}: lengths in tokens and seconds "
            "depend on them."
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
