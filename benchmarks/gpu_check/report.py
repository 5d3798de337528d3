"""Report of the checks: `report.md` for people and `report.json` for programs."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.runner import Result, Status, tail

REHEARSED = "nothing here ran on a GPU: what needs one was rehearsed or left out, and is `skipped`"


def line(result: Result, number: int, count: int) -> str:
    """Return the line of a check for the terminal."""
    judged = [str(f) for f in result.findings.figures if f.ok and isinstance(f.value, float)]
    shown = result.why or "; ".join(judged[:3]) + ("; ..." if len(judged) > 3 else "")
    name, width = result.check.name, len(str(count))
    return (
        f"[{number:{width}}/{count}] {name:20} {result.status:8} {result.seconds:5.0f} s  {shown}"
    )


def summary(results: Sequence[Result]) -> str:
    """Return how many checks passed, failed and were skipped."""
    statuses: tuple[Status, ...] = ("passed", "failed", "skipped")
    counts = Counter(result.status for result in results)
    minutes = sum(result.seconds for result in results) / 60
    return ", ".join(f"{counts[status]} {status}" for status in statuses) + f" in {minutes:.0f} min"


def write(results: Sequence[Result], folder: Path, device: str) -> None:
    """Write both files with the checks so far."""
    held = {
        "device": device,
        "command": shlex.join(sys.orig_argv),
        "summary": summary(results),
        "checks": [result.to_json() for result in results],
    }
    (folder / "report.json").write_text(json.dumps(held, indent=1) + "\n")
    (folder / "report.md").write_text(page(results, device))


def page(results: Sequence[Result], device: str) -> str:
    """Return the report as Markdown."""
    lines = ["# gpu-check", "", f"{summary(results)}, device `{device}`."]
    if device == "cpu":
        lines += ["", f"**A rehearsal on CPU**: {REHEARSED}."]
    lines += ["", "| check | | seconds | |", "|---|---|---|---|"]
    for result in results:
        status = "**failed**" if result.status == "failed" else result.status
        why = _cell(result.why or result.check.shows)
        lines.append(f"| {result.check.name} | {status} | {result.seconds:.0f} | {why} |")
    for result in results:
        lines += ["", *_section(result)]
    return "\n".join(lines) + "\n"


def _section(result: Result) -> list[str]:
    lines = [f"## {result.check.name}: {result.status}", "", result.check.shows]
    if result.why:
        lines += ["", result.why]
    if result.findings.figures:
        lines += ["", "| figure | measured | limit | |", "|---|---|---|---|"]
    for figure in result.findings.figures:
        value = f"{figure.value:,.4g}" if isinstance(figure.value, float) else str(figure.value)
        verdict = {None: "", True: "ok", False: "**not met**"}[figure.ok]
        cells = (figure.name, f"{value} {figure.unit}".strip(), figure.limit, verdict)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    if result.status == "failed" and (text := result.findings.error or tail(result.log)):
        lines += ["", "```", text.strip(), "```"]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
