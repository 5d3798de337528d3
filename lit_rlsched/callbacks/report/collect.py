"""What a report shows of a run, read from its folder."""

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_rlsched.callbacks.pictures.comparison import ROUND, TIME, read_run
from lit_rlsched.callbacks.what_if import about_of, first, what_if
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.saving.run_folder import full_name_of
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.text import as_text
from lit_rlsched.training.schedule import RunFacts

if TYPE_CHECKING:
    import pyarrow as pa

Json = dict[str, Any]

MOST_SPANS = 100_000
"""Times in a slot, and intervals of lanes, that all timelines of a page show together."""
MOST_SPANS_OF_ROUND = 4000
MOST_TEXT = 3_000_000
"""Bytes of all completions and prompts of a page together."""
MOST_TEXT_OF_ONE = 4000
"""Characters of a cell."""
CURVES = ("reward", "completions/mean_length", "kl", "entropy")
"""Metrics that are shown of each round, besides those of each reward function."""
OF_ROUND = (
    *("rollout/bubble_ratio", "rollout/tokens_per_second"),
    *("rollout/trained_over_drawn_length", "pool/trained_over_drawn_length"),
)
"""Metrics of the rollouts that are shown of each round."""
ENDS = (
    *("ended by itself", "cut at the limit", "dropped", "left for a later round", "not used"),
    "not ended yet",
)
"""How a completion's time in a round ended."""
ENDED, CUT, DROPPED, LATER, UNUSED, OPEN = range(len(ENDS))
KINDS = (
    *("several rewards", "all right", "all wrong", "one text", "one other reward"),
    "no reward",
)
"""Kinds of groups; only the first has something to learn from."""


def run_data(
    folder: str | Path,
    facts: RunFacts | None = None,
    record: RunRecord | None = None,
    share: float = 1.0,
) -> Json:
    """Return what the report shows of a run, as JSON.

    Args:
        folder: Folder of the run.
        facts: Facts about the run, to simulate other schedules on its lengths and costs.
        record: What a run that goes on has measured; its files may not have it yet.
        share: Share of a page's timelines and completions that are this run's.

    Raises:
        UsageError: the folder has no traces, or none of a whole round.
    """
    traces = Traces(folder)
    traces.check()
    folder = traces.folder.parent
    rounds = traces.rows("rounds")
    if not rounds:
        raise UsageError(f"`{folder}` holds no whole round yet. Wait for the first.")
    about = about_of(traces)
    metrics, validations = _metrics(folder, rounds, record)
    groups, lengths = _completions(traces)
    timelines = _timelines(traces, rounds, share)
    texts, notes = _texts(folder / "completions.jsonl", share)
    schedules: list[list[Any]] = []
    if facts is not None:
        try:
            schedules = [_schedule(row) for row in first(what_if(traces, facts))]
        except UsageError as error:
            notes.append(f"No other schedule was simulated: {error}")
    notes += _missing(traces, rounds, timelines)
    rewards = sorted({n for row in metrics for n in row if _is_reward(n)})
    return {
        "name": full_name_of(folder),
        "folder": str(folder),
        "notes": notes,
        "facts": _facts(about),
        "compared": {name: about.get(name) for name in COMPARED},
        "curves": _columns(metrics, ("round", "seconds", *CURVES)),
        "rewards": _columns(metrics, ("round", "seconds", *rewards)),
        "validations": _columns(validations, _accuracies(validations)),
        "rollouts": _columns(metrics, ("round", "seconds", *OF_ROUND)),
        "lanes": _seconds_by_lane(traces),
        "lengths": lengths,
        "groups": groups,
        "timelines": timelines,
        "completions": texts,
        "schedules": schedules,
    }


COMPARED = {
    "reward_funcs": "reward functions",
    "train_data": "training data",
    "model": "models",
    "tokenizer": "tokenizers",
}
"""Settings that must be equal for runs to be compared, and what they are called."""


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {
        "Model": about.get("model"),
        "Training data": about.get("train_data"),
        "Callbacks of the schedule": ", ".join(about["callbacks"]) or "none",
        "Prompts of a round": about.get("prompts_per_round"),
        "Completions of a prompt": about.get("num_generations"),
        "Most tokens of a completion": about.get("max_completion_length"),
        "Engine": about.get("engine"),
        "Engines": about.get("engines"),
        "Slots": about.get("slots"),
        "Ranks": about.get("ranks"),
        "Reward functions": ", ".join(about.get("reward_funcs") or ()),
    }
    return [(name, str(value)) for name, value in rows.items() if value is not None]


def _missing(
    traces: Traces, rounds: Sequence[Mapping[str, Any]], timelines: Sequence[Json]
) -> list[str]:
    """Say what the traces do not have, or not as a reader expects it."""
    said, begin = [], rounds[0]["round"]
    for name in ("completions", "spans", "intervals"):
        table = traces.table(name)
        if table.num_rows and (oldest := table["round"][0].as_py()) > begin:
            said.append(
                f"Of {name} the traces have rounds from {oldest} on: the older ones were deleted "
                "to keep the traces small."
            )
    if timelines and all(row["began"] is None for row in rounds):
        said.append(
            "The engine's clock is simulated: seconds of timelines, idle slot-time and tokens a "
            "second are made up."
        )
    return said


def _is_reward(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


def _metrics(
    folder: Path, rounds: Sequence[Mapping[str, Any]], record: RunRecord | None
) -> tuple[list[Json], list[Json]]:
    """Return the metrics of each round, and those of each validation."""
    of: dict[int, Json] = {}
    steps: dict[int, int] = {}
    for row in rounds:
        of[row["round"]] = {"seconds": row["clock"], **dict(row["metrics"])}
        steps[row["round"]] = row["version"]
    validations: dict[float, Json] = {}
    logged: list[dict[str, float]] = []
    with suppress(UsageError):  # another logger has them
        logged = read_run(folder)
    for row in logged:
        number = int(row[ROUND])
        if "reward" in row and number in of:
            of[number] |= {**row, "seconds": row[TIME]}
        elif held_out := {n: v for n, v in row.items() if n.startswith("val/")}:
            validations[row["step"]] = {"round": number, "seconds": row[TIME], **held_out}
    if record is not None:
        for known in record.rounds:
            if (number := int(known["round"])) in of:
                of[number] |= {n: v for n, v in known.items() if n not in ("round", "step")}
        for known in record.validations:
            before = [n for n, step in steps.items() if step < known["step"]]
            at = max(before, default=0)
            seconds = of[at]["seconds"] if at else 0.0
            validations.setdefault(known["step"], {"round": at, "seconds": seconds, **known})
        measured = {row["step"] for row in record.validations}
        validations = {step: row for step, row in validations.items() if step in measured}
    found = [{"round": number, **of[number]} for number in sorted(of)]
    kept = [row for _, row in sorted(validations.items()) if row["round"] in (0, *of)]
    return found, kept


def _accuracies(validations: Sequence[Json]) -> list[str]:
    names = {name for row in validations for name in row}
    kept = [n for n in sorted(names) if n == "val/greedy_accuracy" or n.startswith("val/mean@")]
    return ["round", "seconds", *(kept or ["val/accuracy"])]


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Json:
    """Return columns of numbers, without those that have none."""
    columns = {name: [_number(row.get(name)) for row in rows] for name in names}
    return {name: of for name, of in columns.items() if any(v is not None for v in of)}


def _number(value: Any) -> float | str | None:
    """Return a number with five digits, and `None` for what is no finite number."""
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)[:MOST_TEXT_OF_ONE]
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def _parts(table: "pa.Table") -> dict[int, "pa.Table"]:
    """Return the rows of each round; they follow one another."""
    if not table.num_rows:
        return {}
    found, at = np.unique(table["round"].to_numpy(), return_index=True)
    ends = [*at[1:].tolist(), table.num_rows]
    places = zip(found.tolist(), at.tolist(), ends, strict=True)
    return {number: table.slice(begin, end - begin) for number, begin, end in places}


def _completions(traces: Traces) -> tuple[Json, Json]:
    """Return the groups and the lengths of each round."""
    parts = _parts(traces.table("completions"))
    if not parts:
        return {}, {}
    counts: dict[int, Counter[str]] = {}
    rows = []
    every: dict[str, list[int]] = {"ended": [], "with an advantage": []}
    best, worst = _extremes(traces)
    for number, part in parts.items():
        ended: dict[str, list[Json]] = defaultdict(list)
        drawn, trained = [], []
        for row in part.to_pylist():
            if row["fate"] not in ("stop", "length"):
                continue
            drawn.append(row["drawn"])
            if row["advantage"] and math.isfinite(row["advantage"]):
                trained.append(row["drawn"])
            ended[row["request"].rpartition("/")[0]].append(row)
        counts[number] = Counter(_kind(of, best, worst) for of in ended.values())
        if drawn:
            low, middle, high = np.quantile(drawn, (0.1, 0.5, 0.9)).tolist()
            row = {"round": number, "10 %": low, "median": middle, "90 %": high}
            row["mean"] = float(np.mean(drawn))
            row["mean with an advantage"] = float(np.mean(trained)) if trained else None
            rows.append(row)
        every["ended"] += drawn
        every["with an advantage"] += trained
    numbers = sorted(counts)
    groups = {"round": numbers, **{k: [counts[n][k] for n in numbers] for k in KINDS}}
    return groups, _lengths(rows, every)


def _extremes(traces: Traces) -> tuple[float, float]:
    rewards = traces.table("completions")["reward"].to_numpy(zero_copy_only=False).astype(float)
    rewards = rewards[np.isfinite(rewards)]
    return (rewards.max(), rewards.min()) if len(rewards) else (math.nan, math.nan)


def _kind(group: Sequence[Json], best: float, worst: float) -> str:
    """Return what the rewards of a group's completions say about it."""
    rewards = [of["reward"] for of in group if of["reward"] is not None]
    rewards = [reward for reward in rewards if math.isfinite(reward)]
    if not rewards:
        return "no reward"
    if max(rewards) - min(rewards) > 1e-9:
        return "several rewards"
    texts = {of.get("text") for of in group}
    if len(group) > 1 and len(texts) == 1 and None not in texts:
        return "one text"
    if best == worst:  # of the whole run
        return "all right" if best > 0 else "all wrong"
    if rewards[0] in (best, worst):
        return "all right" if rewards[0] == best else "all wrong"
    return "one other reward"


def _lengths(rows: Sequence[Json], every: Mapping[str, Sequence[int]]) -> Json:
    """Return lengths of each round, and a histogram of those of all rounds."""
    if not every["ended"]:
        return {}
    longest = max(*every["ended"], 2)
    edges = np.unique(np.geomspace(max(1, min(every["ended"])), longest + 1, 32).round())
    names = ("round", "10 %", "median", "90 %", "mean", "mean with an advantage")
    counts = {name: np.histogram(of, edges)[0].tolist() for name, of in every.items()}
    return {"rounds": _columns(rows, names), "edges": edges.astype(int).tolist(), **counts}


def _seconds_by_lane(traces: Traces) -> Json:
    """Return seconds of each round by what trainer and engines did."""
    table = traces.table("intervals")
    if not table.num_rows:
        return {}
    found: dict[str, dict[str, Counter[int]]] = {k: defaultdict(Counter) for k in (TRAINER, "")}
    names = ("round", "lane", "what", "start", "end", "waits_for")
    engines = {lane for lane in table["lane"].unique().to_pylist() if lane != TRAINER}
    for number, lane, what, start, end, whom in zip(
        *(table[name].to_pylist() for name in names), strict=True
    ):
        share = 1 if lane == TRAINER else len(engines)
        does = _does(what, whom)
        found[TRAINER if lane == TRAINER else ""][does][number] += (end - start) / share
    numbers = sorted(set(table["round"].to_pylist()))
    return {
        "round": numbers,
        "trainer": _by_round(found[TRAINER], numbers),
        "engines": _by_round(found[""], numbers),
    }


def _does(what: str, whom: str | None) -> str:
    return f"waits for {whom}" if whom else what


def _by_round(seconds: Mapping[str, Mapping[int, float]], numbers: Sequence[int]) -> Json:
    return {what: [_number(of.get(n, 0.0)) for n in numbers] for what, of in seconds.items()}


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


def _timelines(traces: Traces, rounds: Sequence[Mapping[str, Any]], share: float) -> list[Json]:
    """Return what the slots did in each round that is shown."""
    parts = _parts(traces.table("spans"))
    if not parts:
        return []
    lanes = _Lanes(traces)
    began = {row["round"]: row["began"] for row in rounds if row["began"] is not None}
    of_lanes: dict[int, list[Json]] = {}
    sizes = {}
    for number, part in parts.items():
        if number in began:
            later = min((at for n, at in began.items() if n > number), default=math.inf)
            of_lanes[number] = lanes.between(began[number], later)
        beside = sum(len(lane["what"]) for lane in of_lanes.get(number, ()))
        sizes[number] = min(part.num_rows, MOST_SPANS_OF_ROUND) + beside
    numbers, newest = kept(sizes, share * MOST_SPANS), max(parts)
    fates, last = _seen(traces, [parts[number] for number in numbers])
    found = []
    for number in numbers:
        line = _timeline(parts[number], number, fates, last, number == newest)
        of = {"round": number, "began": began.get(number), "lanes": of_lanes.get(number, [])}
        found.append({**of, **line})
    return found


def _seen(
    traces: Traces, parts: Sequence["pa.Table"]
) -> tuple[dict[str, tuple[int, Json]], dict[str, int]]:
    """Return the completions of some rounds' spans, with the round that has ended each.

    And of each request the last round in which it decoded.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.concat_arrays([chunk for part in parts for chunk in part["request"].chunks])

    def rows(name: str) -> pa.Table:
        table = traces.table(name)
        return table.filter(pc.is_in(table["request"], wanted)) if table.num_rows else table

    fates = {row["request"]: (row["round"], row) for row in rows("completions").to_pylist()}
    spans = rows("spans")
    columns = (spans[name].to_pylist() for name in ("request", "round"))
    return fates, dict(zip(*columns, strict=True))  # the rounds are in order


def _timeline(
    part: "pa.Table",
    number: int,
    fates: Mapping[str, tuple[int, Json]],
    last: Mapping[str, int],
    newest: bool,
) -> Json:
    """Return the times in slots of a round.

    Args:
        part: Rows of `spans`.
        number: Number of the round.
        fates: Completions that a round has ended, with its number.
        last: The last round in which each request decoded.
        newest: Whether there is no later round.
    """
    spans = part.select(["request", "slot", "start", "end", "tokens"]).to_pylist()
    spans.sort(key=lambda span: (span["start"], span["slot"]))
    drew: Counter[str] = Counter()
    first_of: dict[str, int] = {}
    last_of: dict[str, int] = {}
    for place, span in enumerate(spans):
        drew[span["request"]] += span["tokens"]
        first_of.setdefault(span["request"], place)
        last_of[span["request"]] = place
    slots = sorted({span["slot"] for span in spans})
    stride = -(-len(spans) // MOST_SPANS_OF_ROUND)
    shown = {*slots[::stride]}
    requests: dict[str, int] = {}
    prompts: dict[str, int] = {}
    rows = []
    columns: dict[str, list[Any]] = {
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
            more = (_number(of.get("reward")), *(of.get(n) or 0 for n in MORE))
            rows.append([prompt, index, end, max(0, before), *more])
        columns["slot"].append(span["slot"])
        columns["start"].append(round(1000 * span["start"]))
        columns["end"].append(round(1000 * span["end"]))
        columns["tokens"].append(span["tokens"])
        columns["request"].append(requests[request])
        columns["first"].append(int(first_of[request] == place))
        columns["last"].append(int(last_of[request] == place))
    return {
        "slots": len(slots),
        "every": stride,
        "prompts": [*prompts],
        "requests": rows,
        **columns,
    }


MORE = ("waited", "deferred", "attempts")
"""What else is told of a completion."""


class _Lanes:
    """Intervals of trainer and engines on the clock of the run."""

    def __init__(self, traces: Traces) -> None:
        self._of: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for row in traces.rows("intervals"):
            does = _does(row["what"], row["waits_for"])
            self._of[row["lane"]].append((row["start"], row["end"], does))
        for intervals in self._of.values():
            intervals.sort()

    def between(self, start: float, end: float) -> list[Json]:
        """Return the intervals of each lane, in thousandths of a second since `start`."""
        found = []
        for lane in sorted(self._of, key=lambda lane: (lane != TRAINER, len(lane), lane)):
            every = self._of[lane]
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
            found.append(
                {
                    "lane": lane,
                    "start": [round(1000 * (a - start)) for a, _, _ in merged],
                    "end": [round(1000 * (b - start)) for _, b, _ in merged],
                    "what": [does for *_, does in merged],
                }
            )
        return found


def _texts(path: Path, share: float) -> tuple[Json, list[str]]:
    """Return the rows of completions of each round that is shown, and what could not be read."""
    sizes: Counter[int] = Counter()
    lines = unreadable = 0
    for number, cells in _rows_of(path):
        lines += 1
        if number is None:
            unreadable += 1
        else:
            sizes[number] += sum(_bytes(cell) for cell in cells.values())
    numbers = {*kept(sizes, share * MOST_TEXT)}
    rows = [cells for number, cells in _rows_of(path) if number in numbers]
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name != "step"]
    left = share * MOST_TEXT
    shown: list[list[Any]] = []
    for row in rows:
        left -= sum(map(_bytes, row.values()))
        if left < 0 and shown:
            break
        shown.append([row.get(name) for name in names])
    notes = []
    if unreadable:
        notes.append(f"`{path.name}`: {unreadable} of {lines} lines cannot be read.")
    data = {"rounds": len(numbers), "of": len(sizes), "shown": len(shown), "in_them": len(rows)}
    return {**data, "columns": names, "rows": shown}, notes


def _rows_of(path: Path) -> Iterable[tuple[int | None, Json]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                yield int(row["round"]), {name: _cell(name, value) for name, value in row.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                yield None, {}  # cut by a kill


def _bytes(cell: Any) -> int:
    return len(cell.encode("utf-8", "backslashreplace")) if isinstance(cell, str) else 8


def _cell(name: str, value: Any) -> Any:
    """Return a number, or text that is not too long."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(value)
    chat = isinstance(value, str) or name in ("prompt", "completion")
    text = as_text(value) if chat else json.dumps(value, ensure_ascii=False)
    if len(text) > MOST_TEXT_OF_ONE:
        text = f"{text[:MOST_TEXT_OF_ONE]} … ({len(text):,} characters)"
    return text


def _schedule(row: Any) -> list[Any]:
    of = row.outcome
    shares = (of.idle_share, of.discarded_share, of.stale_share, of.length_bias)
    return [row.name, *map(_number, (of.seconds, of.decode_steps, *shares, of.peak_kv))]
