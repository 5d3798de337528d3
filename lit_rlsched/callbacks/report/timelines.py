"""What the slots, the trainer and the engines did in each round that a report shows."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace_files import Traces

if TYPE_CHECKING:
    import pyarrow as pa

Json = dict[str, Any]
Fates = dict[str, tuple[int, Json]]
"""The rounds in which requests have ended, and their rows of completions."""

MOST_SPANS = 100_000
"""Times in a slot, and intervals of lanes, that all timelines of a page show together."""
MOST_SPANS_OF_ROUND = 4000
ENDS = (
    *("ended by itself", "cut at the limit", "dropped", "left for a later round", "not used"),
    "not ended yet",
)
"""How a completion's time in a round ended."""
ENDED, CUT, DROPPED, LATER, UNUSED, OPEN = range(len(ENDS))
MORE = ("waited", "deferred", "attempts")
"""What else is told of a completion."""


def rounded(value: Any) -> float | str | None:
    """Return a number with five digits, and `None` for what is no finite number."""
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def split(table: "pa.Table") -> dict[int, "pa.Table"]:
    """Return the rows of each round; they follow one another."""
    if not table.num_rows:
        return {}
    found, at = np.unique(table["round"].to_numpy(), return_index=True)
    places = zip(found.tolist(), at.tolist(), [*at[1:].tolist(), table.num_rows], strict=True)
    return {number: table.slice(begin, end - begin) for number, begin, end in places}


def activity(what: str, whom: str | None) -> str:
    return f"waits for {whom}" if whom else what


def kept(sizes: Mapping[int, int], most: float) -> list[int]:
    """Return the newest round, and as many rounds in equal steps before it as fit."""
    if not sizes:
        return []
    newest, step = max(sizes), 1
    while True:
        found = [n for n in sizes if (newest - n) % step == 0]
        if len(found) == 1 or sum(sizes[n] for n in found) <= most:
            return sorted(found)
        step *= 2


def timelines(traces: Traces, rounds: Sequence[Mapping[str, Any]], share: float) -> list[Json]:
    """Return what the slots did in each round that is shown."""
    parts = split(traces.table("spans"))
    if not parts:
        return []
    lanes = _lanes(traces)
    began = {row["round"]: row["began"] for row in rounds if row["began"] is not None}
    of_lanes: dict[int, list[Json]] = {}
    later = math.inf
    for number in sorted(began, reverse=True):
        of_lanes[number] = _between(lanes, began[number], later)
        later = min(later, began[number])
    sizes = {
        number: min(part.num_rows, MOST_SPANS_OF_ROUND)
        + sum(len(lane["what"]) for lane in of_lanes.get(number, ()))
        for number, part in parts.items()
    }
    numbers, newest = kept(sizes, share * MOST_SPANS), max(parts)
    fates, last = _seen(traces, [parts[number] for number in numbers])
    found = []
    for number in numbers:
        line = _timeline(parts[number], number, fates, last, number == newest)
        of = {"round": number, "began": began.get(number), "lanes": of_lanes.get(number, [])}
        found.append({**of, **line})
    return found


def _seen(traces: Traces, parts: Sequence["pa.Table"]) -> tuple[Fates, dict[str, int]]:
    """Return the fates of some rounds' spans, and the last round in which each request decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.concat_arrays([chunk for part in parts for chunk in part["request"].chunks])
    known, spans = (traces.table(name) for name in ("completions", "spans"))
    if known.num_rows:
        known = known.filter(pc.is_in(known["request"], wanted))
    spans = spans.filter(pc.is_in(spans["request"], wanted))
    fates = {row["request"]: (row["round"], row) for row in known.to_pylist()}
    columns = (spans[name].to_pylist() for name in ("request", "round"))
    return fates, dict(zip(*columns, strict=True))  # the rounds are in order


def _timeline(
    part: "pa.Table", number: int, fates: Fates, last: Mapping[str, int], newest: bool
) -> Json:
    """Return the times in slots of a round, from its spans; `last` is each request's last round."""
    spans = part.select(["request", "slot", "start", "end", "tokens"]).to_pylist()
    spans.sort(key=lambda span: (span["start"], span["slot"]))
    drew: Counter[str] = Counter()
    for span in spans:
        drew[span["request"]] += span["tokens"]
    last_of = {span["request"]: place for place, span in enumerate(spans)}
    first_of = {spans[place]["request"]: place for place in reversed(range(len(spans)))}
    slots = sorted({span["slot"] for span in spans})
    stride = -(-len(spans) // MOST_SPANS_OF_ROUND)
    shown = {*slots[::stride]}
    requests: dict[str, int] = {}
    prompts: dict[str, int] = {}
    rows = []
    columns: dict[str, list[int]] = {
        name: [] for name in ("slot", "start", "end", "tokens", "request", "first", "last")
    }
    for place, span in enumerate(spans):
        if span["slot"] not in shown:
            continue
        request = span["request"]
        if request not in requests:
            requests[request] = len(requests)
            group, _, index = request.rpartition("/")
            prompt = prompts.setdefault(group, len(prompts))
            at, of = fates.get(request, (number, {}))
            if last[request] > number:
                end = LATER
            elif not of:
                end = OPEN if newest else UNUSED
            else:
                end = {"stop": ENDED, "length": CUT}.get(of["fate"], DROPPED)
            before = of["drawn"] - drew[request] if of and at == number else 0
            more = (rounded(of.get("reward")), *(of.get(n) or 0 for n in MORE))
            rows.append([prompt, index, end, max(0, before), *more])
        ends = int(first_of[request] == place), int(last_of[request] == place)
        times = round(1000 * span["start"]), round(1000 * span["end"])
        figures = span["slot"], *times, span["tokens"], requests[request], *ends
        for column, figure in zip(columns.values(), figures, strict=True):
            column.append(figure)
    about = {"slots": len(slots), "every": stride, "prompts": [*prompts], "requests": rows}
    return about | columns


def _lanes(traces: Traces) -> dict[str, list[tuple[float, float, str]]]:
    """Return intervals of trainer and engines on the clock of the run."""
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for row in traces.rows("intervals"):
        does = activity(row["what"], row["waits_for"])
        found[row["lane"]].append((row["start"], row["end"], does))
    order = sorted(found, key=lambda lane: (lane != TRAINER, len(lane), lane))
    return {lane: sorted(found[lane]) for lane in order}


def _between(
    lanes: Mapping[str, Sequence[tuple[float, float, str]]], start: float, end: float
) -> list[Json]:
    """Return the intervals of each lane, in thousandths of a second since `start`."""
    found = []
    for lane, every in lanes.items():
        begin = max(0, bisect_left(every, (start,)) - 1)
        inside = [i for i in every[begin : bisect_left(every, (end,))] if i[1] > start]
        inside = [(max(a, start), min(b, end), does) for a, b, does in inside]
        if not inside:
            continue
        gap = (inside[-1][1] - inside[0][0]) / 400
        merged: list[tuple[float, float, str]] = []
        for a, b, does in inside:
            if merged and merged[-1][2] == does and a - merged[-1][1] <= gap:
                merged[-1] = merged[-1][0], b, does
            elif b - a >= gap / 8 or not merged:
                merged.append((a, b, does))
        starts = [round(1000 * (begun - start)) for begun, *_ in merged]
        ends = [round(1000 * (ended - start)) for _, ended, _ in merged]
        what = [does for *_, does in merged]
        found.append({"lane": lane, "start": starts, "end": ends, "what": what})
    return found
