"""The timeline of a run as a file in Chrome's trace format, which ui.perfetto.dev shows."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_rlsched.scheduling.timeline import Lap

MICROSECONDS = 1e6


class TraceFile:
    """Appends intervals to a file: a JSON array with a line for each, without its last bracket.

    The format allows the bracket to be missing. Times are microseconds of the run's clock, which a
    resumed run continues.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lanes: set[str] = set()

    def keep(self, seconds: float) -> None:
        """Drop what came after the run's clock showed `seconds`, and lines cut by a kill."""
        limit, kept = seconds * MICROSECONDS, ["[\n"]
        for line in _lines(self._path):
            event = json.loads(line.rstrip(",\n"))
            if event["ph"] == "M":
                self._lanes.add(event["args"]["name"])
            elif event["ts"] >= limit:
                continue
            elif event["ts"] + event["dur"] > limit:
                event["dur"] = round(limit - event["ts"])
            kept.append(_line(event))
        shortened = self._path.with_suffix(".tmp")
        shortened.parent.mkdir(parents=True, exist_ok=True)
        shortened.write_text("".join(kept), encoding="utf-8")
        os.replace(shortened, self._path)

    def add(self, lap: Lap, at: Callable[[float], float], round: int) -> None:
        """Append a lap.

        Args:
            lap: Part of the timeline.
            at: Returns what the run's clock showed at a moment of the timeline.
            round: Number of the round with whose rollout the lap ends.
        """
        lines = []
        for number, (lane, intervals) in enumerate(lap.lanes.items()):
            of = {"pid": 0, "tid": number}
            if lane not in self._lanes:
                self._lanes.add(lane)
                lines.append(
                    _line({"ph": "M", "name": "thread_name", **of, "args": {"name": lane}})
                )
            for what, start, end, whom in (i[1:] for i in intervals):
                first, last = (int(at(moment) * MICROSECONDS) for moment in (start, end))
                name = what if whom is None else f"{what}: waits for {whom}"
                time = {"ts": first, "dur": last - first}
                args = {"round": round, "waits_for": whom}
                lines.append(_line({"ph": "X", "name": name, **time, **of, "args": args}))
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + ",\n"


def _lines(path: Path) -> list[str]:
    """Return the events of a file that were written whole."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith(",\n")]
