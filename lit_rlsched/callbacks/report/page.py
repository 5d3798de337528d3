"""The report as one HTML file that needs no network, and its timelines as a trace for Perfetto."""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.report.collect import COMPARED
from lit_rlsched.callbacks.report.timelines import ENDS
from lit_rlsched.run.saving.run_folder import names_of
from lit_rlsched.scheduling.trace_files import write_whole
from lit_rlsched.text import printable

FILE = "report.html"
"""Its name in the folder of a run."""
FORBIDDEN = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""Nothing is loaded from anywhere, and nothing is sent."""
MOST_BYTES = 10_000_000
"""Size of a page."""


def write_report(path: str | Path, runs: Sequence[dict[str, Any]], going_on: bool = False) -> Path:
    """Write the report of what `run_data` returns; a reader meanwhile sees the one before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = f"Made on {datetime.now():%Y-%m-%d %H:%M:%S}{', while the run went on' * going_on}."
    names = names_of([Path(run["folder"]) for run in runs])
    runs = [{**run, "name": name} for run, name in zip(runs, names, strict=True)]
    data: dict[str, Any] = {"title": f"Report of {', '.join(names)}"}
    data |= {"made": made, "notes": notes(runs), "ends": ENDS, "runs": runs}
    script = _own("page.js")
    digests = (hashlib.sha256(of.encode()).digest() for of in (plotly(), script))
    allowed = " ".join(f"'sha256-{base64.b64encode(of).decode()}'" for of in digests)
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
    return path


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


LANES, SLOTS = 1, 2
"""Rows of trainer and engines, and rows of slots, of the first run."""


def write_trace(path: str | Path, runs: Sequence[dict[str, Any]]) -> Path:
    """Write the timelines of runs as trace events, one below the other."""
    events = [event for number, run in enumerate(runs) for event in _events(run, 2 * number)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data, path = text.encode(), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def _events(run: dict[str, Any], below: int) -> Iterator[dict[str, Any]]:
    lanes, slots = LANES + below, SLOTS + below
    for pid, what in ((lanes, "trainer and engines"), (slots, "slots")):
        name = {"name": f"{run['name']}: {what}"}
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name}
    named: dict[str, int] = {}
    end_of_last = 0
    for of in run["timelines"]:
        # a simulated clock begins anew in each round
        origin = end_of_last if of["began"] is None else round(1e6 * of["began"])
        for lane in of["lanes"]:
            if lane["lane"] not in named:
                named[lane["lane"]] = tid = len(named) + 1
                name = {"name": lane["lane"]}
                yield {"ph": "M", "name": "thread_name", "pid": lanes, "tid": tid, "args": name}
            for start, end, what in zip(lane["start"], lane["end"], lane["what"], strict=True):
                yield _bar(what, lanes, named[lane["lane"]], origin, start, end)
        changes = []
        columns = (of[name] for name in ("request", "slot", "start", "end", "tokens", "last"))
        for request, slot, start, end, tokens, last in zip(*columns, strict=True):
            prompt, index, ended, before, reward, *_ = of["requests"][request]
            then = ENDS[ended] if last else "paused"
            more = {"round": of["round"], "tokens": tokens, "before": before, "then": then}
            more["reward"] = reward
            request_id = f"{of['prompts'][prompt]}/{index}"
            yield {**_bar(request_id, slots, slot + 1, origin, start, end), "args": more}
            changes += [(start, 1), (end, -1)]
        running = 0
        for at, change in sorted(changes):
            running += change
            counter = {"completions": running}
            end_of_last = origin + 1000 * at
            yield {
                **{"ph": "C", "name": "decoding", "pid": slots, "tid": 0},
                **{"ts": end_of_last, "args": counter},
            }


def _bar(name: str, pid: int, tid: int, origin: int, start: int, end: int) -> dict[str, Any]:
    begin, duration = origin + 1000 * start, 1000 * (end - start)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": duration}
