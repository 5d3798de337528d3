"""The timelines of a report in the trace event format, for https://ui.perfetto.dev."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.report.timelines import ENDS

LANES, SLOTS = 1, 2
"""Rows of trainer and engines, and rows of slots, of the first run."""


def write_trace(path: str | Path, runs: Sequence[dict[str, Any]]) -> Path:
    """Write the timelines of runs as trace events, one below the other."""
    events = [event for number, run in enumerate(runs) for event in _events(run, 2 * number)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = text.encode()
    path = Path(path)
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
