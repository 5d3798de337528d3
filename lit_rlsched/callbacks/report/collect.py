"""What a report shows of a run, read from its folder."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lit_rlsched.callbacks.pictures.comparison import ROUND, TIME, read_run
from lit_rlsched.callbacks.what_if import Simulated, about_of, first
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.saving.run_folder import full_name_of
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.text import as_text

Json = dict[str, Any]

MOST_SPANS = 120_000
"""Times in a slot that all timelines of a page show together."""
MOST_SPANS_OF_ROUND = 4000
MOST_TEXT = 3_000_000
"""Characters of all completions and prompts of a page together."""
MOST_TEXT_OF_ONE = 4000
CURVES = ("reward", "reward_std", "completions/mean_length", "kl", "entropy", "loss")
"""Metrics that are shown of each round, besides held-out accuracies."""
OF_ROUND = ("rollout/bubble_ratio", "rollout/tokens_per_second", "rollout/seconds")
"""Metrics of the engines that are shown of each round."""
ENDS = (
    "ended by itself",
    "cut at the limit",
    "dropped",
    "left for a later round",
    "not seen again",
)
"""How a completion's time in a round ended."""
ENDED, CUT, DROPPED, LATER, UNUSED = range(len(ENDS))


def run_data(
    folder: str | Path,
    schedules: Sequence[Simulated] = (),
    record: RunRecord | None = None,
    share: float = 1.0,
) -> Json:
    """Return what the report shows of a run, as JSON.

    Args:
        folder: Folder of the run.
        schedules: Simulations of other schedules on the run's lengths.
        record: What a run that goes on has measured; its files may not have it yet.
        share: Share of a page's timelines and completions that are this run's.

    Raises:
        UsageError: the folder has no traces, or none of a whole round.
    """
    traces = Traces(folder)
    rounds = traces.rows("rounds")
    if not rounds:
        raise UsageError(f"`{folder}` holds no whole round yet. Wait for the first.")
    metrics, validations = _metrics(traces.folder.parent, rounds, record)
    completions = _completions(traces)
    about = about_of(traces)
    return {
        "name": full_name_of(traces.folder.parent),
        "facts": _facts(about),
        "compared": {name: about.get(name) for name in ("model", "reward_funcs", "tokenizer")},
        "reward_funcs": about.get("reward_funcs") or [],
        "curves": _columns(metrics, ("round", "seconds", *CURVES)),
        "validations": _columns(validations, _names(validations)),
        "engines": _columns(metrics, ("round", "seconds", *OF_ROUND)),
        "lanes": _seconds_by_lane(traces),
        "lengths": _lengths(completions),
        "groups": _groups(completions),
        "timelines": _timelines(traces, completions, rounds, share),
        "completions": _texts(traces.folder.parent / "completions.jsonl", share),
        "schedules": [_schedule(row) for row in first(schedules)],
    }


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    prompts, each = about.get("prompts_per_round"), about.get("num_generations")
    rows = {
        "Model": about.get("model"),
        "Callbacks of the schedule": ", ".join(about["callbacks"]) or "none",
        "Completions of a round": f"{prompts} prompts x {each}",
        "Tokens of a completion": f"at most {about.get('max_completion_length'):,}",
        "Engine": about.get("engine"),
        "Engines": about.get("engines"),
        "Slots": about.get("slots"),
        "Ranks": about.get("ranks"),
        "Reward functions": ", ".join(about.get("reward_funcs") or ()),
    }
    return [(name, str(value)) for name, value in rows.items() if value is not None]


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
    found = [{"round": number, **of[number]} for number in sorted(of)]
    return found, [validations[step] for step in sorted(validations)]


def _names(validations: Sequence[Json]) -> list[str]:
    names = {name for row in validations for name in row}
    kept = [n for n in sorted(names) if n == "val/greedy_accuracy" or n.startswith("val/mean@")]
    return ["round", "seconds", *(kept or ["val/accuracy"])]


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Json:
    """Return columns of numbers, without those that have none."""
    columns = {name: [_number(row.get(name)) for row in rows] for name in names}
    return {name: of for name, of in columns.items() if any(v is not None for v in of)}


def _number(value: Any) -> float | None:
    """Return a number with five digits, and `None` for what is no finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _completions(traces: Traces) -> dict[str, np.ndarray]:
    """Return columns of all completions."""
    table = traces.table("completions")
    found = {n: table[n].to_numpy(zero_copy_only=False) for n in table.column_names}
    requests = found.get("request", np.empty(0, object))
    found["group"] = np.array([name.rpartition("/")[0] for name in requests], object)
    fate = found.get("fate", np.empty(0, object))
    found["ended"] = (fate == "stop") | (fate == "length")
    advantage = found.get("advantage", np.empty(0)).astype(float)
    found["trained"] = found["ended"] & np.isfinite(advantage) & (advantage != 0)
    return found


def _slices(numbers: np.ndarray) -> dict[int, slice]:
    """Return where the rows of each round are; they follow one another."""
    found, at = np.unique(numbers, return_index=True)
    ends = [*at[1:].tolist(), len(numbers)]
    places = zip(found.tolist(), at.tolist(), ends, strict=True)
    return {int(number): slice(begin, end) for number, begin, end in places}


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
        does = f"waits for {whom}" if whom else what
        share = 1 if lane == TRAINER else len(engines)
        found[TRAINER if lane == TRAINER else ""][does][number] += (end - start) / share
    numbers = sorted(set(table["round"].to_pylist()))
    return {
        "round": numbers,
        "trainer": _by_round(found[TRAINER], numbers),
        "engines": _by_round(found[""], numbers),
    }


def _by_round(seconds: Mapping[str, Mapping[int, float]], numbers: Sequence[int]) -> Json:
    return {what: [_number(of.get(n, 0.0)) for n in numbers] for what, of in seconds.items()}


def _lengths(of: Mapping[str, np.ndarray]) -> Json:
    """Return lengths of each round, and a histogram of those of all rounds."""
    if not len(of["group"]):
        return {}
    rows = []
    drawn, trained = of["drawn"].astype(float), of["trained"]
    for number, part in _slices(of["round"]).items():
        lengths = drawn[part]
        low, middle, high = np.quantile(lengths, (0.1, 0.5, 0.9)).tolist()
        row = {"round": number, "10 %": low, "median": middle, "90 %": high}
        row["mean drawn"] = float(lengths.mean())
        if trained[part].any():
            row["mean trained"] = float(lengths[trained[part]].mean())
        rows.append(row)
    names = ("round", "10 %", "median", "90 %", "mean drawn", "mean trained")
    edges = np.unique(np.geomspace(max(drawn.min(), 1), max(drawn.max(), 2) + 1, 32).round())
    return {
        "rounds": _columns(rows, names),
        "edges": edges.astype(int).tolist(),
        "drawn": np.histogram(drawn, edges)[0].tolist(),
        "trained": np.histogram(drawn[trained], edges)[0].tolist(),
    }


def _groups(of: Mapping[str, np.ndarray]) -> Json:
    """Count the groups of each round: those with several rewards, and kinds of the others."""
    kinds = ("several rewards", "all right", "all wrong", "one text", "one other reward")
    if not len(of["group"]):
        return {}
    ended = of["ended"]
    rewards = of["reward"].astype(float)
    best, worst = (f(rewards[ended], initial=math.nan) for f in (np.fmax.reduce, np.fmin.reduce))
    texts = of.get("text")
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    rows: dict[tuple[int, str], list[int]] = defaultdict(list)
    keys = zip(of["round"].tolist(), of["group"], ended.tolist(), strict=True)
    for row, (number, group, counts_too) in enumerate(keys):
        if counts_too:
            rows[number, group].append(row)
    for (number, _), members in rows.items():
        own = rewards[members]
        if not np.isfinite(own).all() or np.ptp(own) > 1e-9:
            kind = "several rewards"
        elif texts is not None and len(members) > 1 and len({*texts[members].tolist()}) == 1:
            kind = "one text"
        elif best > worst and own[0] in (best, worst):
            kind = "all right" if own[0] == best else "all wrong"
        else:
            kind = "one other reward"
        counts[number][kind] += 1
    numbers = sorted(counts)
    return {"round": numbers, **{k: [counts[n][k] for n in numbers] for k in kinds}}


def _timelines(
    traces: Traces,
    completions: Mapping[str, np.ndarray],
    rounds: Sequence[Mapping[str, Any]],
    share: float,
) -> list[Json]:
    """Return what the slots did in each round that is shown."""
    table = traces.table("spans")
    if not table.num_rows:
        return []
    spans = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    places = _slices(spans["round"])
    last_seen = dict(zip(spans["request"], spans["round"].tolist(), strict=True))
    kept = _kept({n: _shown(places[n]) for n in sorted(places)}, share * MOST_SPANS)
    of_round = _slices(completions["round"]) if "round" in completions else {}
    began = {row["round"]: row["began"] for row in rounds}
    slots = {row["round"]: row["slots"] for row in rounds}
    found = []
    lanes = _Lanes(traces)
    for number in kept:
        part = {name: column[places[number]] for name, column in spans.items()}
        rows = (
            {n: c[of_round[number]] for n, c in completions.items()} if number in of_round else {}
        )
        line = _timeline(part, rows, last_seen, number)
        start = began.get(number)
        line["began"] = start or 0.0
        if start is not None:
            later = [at for n in (number + 1,) if (at := began.get(n)) is not None]
            line["lanes"] = lanes.between(start, max(later, default=math.inf))
        found.append({"round": number, "slots": slots.get(number, 0), **line})
    return found


def _kept(sizes: Mapping[int, int], most: float) -> list[int]:
    """Return the newest round, and as many rounds in equal steps before it as fit."""
    kept, step = [*sizes], 1
    while len(kept) > 1 and sum(sizes[n] for n in kept) > most:
        step *= 2
        kept = [n for n in sizes if (n - 1) % step == 0 or n == max(sizes)]
    return kept


def _shown(rows: slice) -> int:
    return min(rows.stop - rows.start, MOST_SPANS_OF_ROUND)


def _timeline(
    spans: Mapping[str, np.ndarray],
    completions: Mapping[str, np.ndarray],
    last_seen: Mapping[str, int],
    number: int,
) -> Json:
    every = np.unique(spans["slot"])
    stride = 1
    while stride < len(every) and (
        np.isin(spans["slot"], every[::stride]).sum() > MOST_SPANS_OF_ROUND
    ):
        stride += 1
    shown = np.isin(spans["slot"], every[::stride])
    spans = {name: column[shown] for name, column in spans.items()}
    requests = [*dict.fromkeys(spans["request"].tolist())]
    place = {request: i for i, request in enumerate(requests)}
    drew: Counter[str] = Counter()
    for request, tokens in zip(spans["request"], spans["tokens"].tolist(), strict=True):
        drew[request] += tokens
    columns = ("request", "drawn", "fate", "reward", "waited")
    found = (
        {r: of for r, *of in zip(*(completions[c] for c in columns), strict=True)}
        if len(completions)
        else {}
    )
    prompts: dict[str, int] = {}
    rows = []
    for request in requests:
        group, _, index = request.rpartition("/")
        prompt = prompts.setdefault(group, len(prompts))
        drawn, fate, reward, waited = found.get(request, (drew[request], None, None, 0))
        end = ENDED if fate == "stop" else CUT if fate == "length" else DROPPED
        if fate is None:
            end = LATER if last_seen[request] > number else UNUSED
        before = int(drawn) - drew[request]
        rows.append([prompt, int(index), end, max(0, before), _number(reward), int(waited)])
    thousandths = {n: np.round(spans[n] * 1000).astype(int).tolist() for n in ("start", "end")}
    return {
        "every": stride,
        "prompts": [*prompts],
        "requests": rows,
        "slot": spans["slot"].tolist(),
        "request": [place[request] for request in spans["request"]],
        "tokens": spans["tokens"].tolist(),
        **thousandths,
    }


class _Lanes:
    """Intervals of trainer and engines on the clock of the run."""

    def __init__(self, traces: Traces) -> None:
        self._of: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for row in traces.rows("intervals"):
            whom = row["waits_for"]
            does = f"waits for {whom}" if whom else row["what"]
            self._of[row["lane"]].append((row["start"], row["end"], does))
        for intervals in self._of.values():
            intervals.sort()
        self._starts = {lane: [at for at, *_ in of] for lane, of in self._of.items()}

    def between(self, start: float, end: float) -> list[Json]:
        """Return the intervals of each lane, in thousandths of a second since `start`."""
        found = []
        for lane in sorted(self._of, key=lambda lane: (lane != TRAINER, len(lane), lane)):
            first = max(0, int(np.searchsorted(self._starts[lane], start)) - 1)
            last = int(np.searchsorted(self._starts[lane], end))
            inside = [i for i in self._of[lane][first:last] if i[1] > start]
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


def _texts(path: Path, share: float) -> Json:
    """Return the rows of completions of each round that is shown."""
    rounds: dict[int, list[Json]] = defaultdict(list)
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    rounds[int(row["round"])].append(row)
                except (ValueError, KeyError, TypeError):
                    continue  # cut by a kill
    sizes = {n: sum(map(_size, rounds[n])) for n in sorted(rounds)}
    kept = _kept(sizes, share * MOST_TEXT)
    rows = [row for n in kept for row in rounds[n]]
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name != "step"]
    return {
        "rounds": len(kept),
        "of": len(rounds),
        "columns": names,
        "rows": [[_cell(name, row.get(name)) for name in names] for row in rows],
    }


def _size(row: Mapping[str, Any]) -> int:
    cells = (_cell(name, value) for name, value in row.items())
    return sum(len(cell) for cell in cells if isinstance(cell, str))


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


def _schedule(row: Simulated) -> list[Any]:
    of = row.outcome
    shares = (of.idle_share, of.discarded_share, of.stale_share, of.length_bias)
    return [row.name, *map(_number, (of.seconds, of.decode_steps, *shares, of.peak_kv))]
