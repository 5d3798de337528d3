"""What a report shows of a run, read from its folder."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lit_rlsched.callbacks.report.timelines import Json, activity, kept, rounded, split, timelines
from lit_rlsched.callbacks.what_if import (
    ENOUGH,
    PLAIN,
    ROUNDS,
    about_of,
    first,
    measured,
    missing,
    named,
    own_schedule,
    setting_of,
)
from lit_rlsched.run.record import ROUND, TIME, RunRecord, read_run
from lit_rlsched.run.saving.run_folder import full_name_of, read_row
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.text import as_text, counted
from lit_rlsched.training.schedule import RunFacts

MOST_TEXT = 3_000_000
"""Bytes of all completions and prompts of a page together."""
MOST_TEXT_OF_ONE = 4000
"""Characters of a cell."""
MOST_PROMPTS = 2000
"""Prompts of the report, those that were drawn most often."""
CURVES = ("reward", "completions/mean_length", "kl", "entropy")
"""Metrics that are shown of each round, besides those of each reward function."""
OF_ROUND = (
    *("rollout/bubble_ratio", "rollout/tokens_per_second"),
    *("rollout/trained_over_drawn_length", "pool/trained_over_drawn_length"),
    *("frac_reward_zero_std", "prompt_choice/known_zero_std"),
)
"""Metrics of the rollouts that are shown of each round."""
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

    With `facts` other schedules are simulated on the run's lengths and costs. `record` is what a
    run that goes on has measured: its files may not have it yet. `share` is the share of a page's
    timelines and completions that are this run's.
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
    names = {name for row in validations for name in row}
    exact = [n for n in sorted(names) if n == "val/greedy_accuracy" or n.startswith("val/mean@")]
    lines = timelines(traces, rounds, share)
    texts, notes = _texts(folder / "completions.jsonl", share)
    schedules: list[list[Any]] = []
    if facts is not None:
        try:
            setting = setting_of(traces, ROUNDS)
            rows = [] if setting is None else setting.ours(facts, most_callbacks=1)
            own = own_schedule(traces, rows)
            took = measured(traces.newest(ROUNDS))
            for row in first(rows):
                of = row.outcome
                shares = (of.idle_share, of.discarded_share, of.stale_share, of.length_bias)
                figures = (of.seconds, of.decode_steps, *shares, of.peak_kv)
                schedules.append([named(row, own, took), *map(rounded, figures)])
            notes += missing(setting) if setting is not None else []
        except UsageError as error:
            notes.append(f"No other schedule was simulated: {error}")
    notes += _missing(traces, rounds, lines)
    means = {name for row in metrics for name in row if name.endswith("/mean")}
    rewards = sorted(name for name in means if name.startswith("rewards/"))
    told = {
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
    return {
        "name": full_name_of(folder),
        "folder": str(folder),
        "verdict": _verdict(metrics, validations, (exact or ["val/accuracy"])[-1], schedules),
        "notes": notes,
        "facts": [(name, str(value)) for name, value in told.items() if value is not None],
        "compared": {name: about.get(name) for name in COMPARED},
        "curves": _columns(metrics, ("round", "seconds", *CURVES)),
        "rewards": _columns(metrics, ("round", "seconds", *rewards)),
        "validations": _columns(validations, ("round", "seconds", *(exact or ["val/accuracy"]))),
        "rollouts": _columns(metrics, ("round", "seconds", *OF_ROUND)),
        "lanes": _seconds_by_lane(traces),
        "lengths": lengths,
        "groups": groups,
        "prompts": _prompts(traces),
        "timelines": lines,
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


def _verdict(
    metrics: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, float]],
    accuracy: str,
    schedules: Sequence[Sequence[Any]],
) -> str:
    """What was learned, how much of the slots was idle, and which schedule is worth a try."""

    def of(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
        return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]

    found = {
        "held-out accuracy": of(validations, accuracy),
        "reward": of(metrics, "reward"),
    }
    learned = [f"{what} {v[0]:.2f} → {v[-1]:.2f}" for what, v in found.items() if v]
    said = f"{' and '.join(learned) or 'Nothing learned'} in {counted(len(metrics), 'round')}."
    if idle := of(metrics, "rollout/bubble_ratio"):
        said += f" {fmean(idle):.0%} of the slot-time was idle."
    plain = next((row[1] for row in schedules if row[0].startswith(PLAIN)), 0.0)
    if schedules and plain > ENOUGH * (fastest := schedules[0])[1]:
        said += f" Fastest of the simulated schedules: {fastest[0]}, {plain / fastest[1]:.1f} times"
        said += f" as fast as no callback, {fastest[5]:.0%} of its tokens from older policies."
    return said[0].upper() + said[1:]


def _missing(
    traces: Traces, rounds: Sequence[Mapping[str, Any]], lines: Sequence[Json]
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
    if lines and all(row["began"] is None for row in rounds):
        said.append(
            "The engine's clock is simulated: seconds of timelines, idle slot-time and tokens a "
            "second are made up."
        )
    return said


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
            at = max((n for n, step in steps.items() if step < known["step"]), default=0)
            seconds = of[at]["seconds"] if at else 0.0
            validations.setdefault(known["step"], {"round": at, "seconds": seconds, **known})
        measured = {row["step"] for row in record.validations}
        validations = {step: row for step, row in validations.items() if step in measured}
    found = [{"round": number, **of[number]} for number in sorted(of)]
    return found, [row for _, row in sorted(validations.items()) if row["round"] in (0, *of)]


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Json:
    """Return columns of numbers, without those that have none."""
    columns = {name: [rounded(row.get(name)) for row in rows] for name in names}
    return {name: of for name, of in columns.items() if any(v is not None for v in of)}


def _completions(traces: Traces) -> tuple[Json, Json]:
    """Return the groups and the lengths of each round, and a histogram of those of all rounds."""
    parts = split(traces.table("completions"))
    if not parts:
        return {}, {}
    counts: dict[int, Counter[str]] = {}
    rows = []
    every: dict[str, list[int]] = {"ended": [], "with an advantage": []}
    known = traces.table("completions")["reward"].to_numpy(zero_copy_only=False).astype(float)
    known = known[np.isfinite(known)]
    best, worst = (known.max(), known.min()) if len(known) else (math.nan, math.nan)
    for number, part in parts.items():
        ended = [row for row in part.to_pylist() if row["fate"] in ("stop", "length")]
        groups_of: dict[str, list[Json]] = defaultdict(list)
        for row in ended:
            groups_of[row["request"].rpartition("/")[0]].append(row)
        counts[number] = Counter(_kind(of, best, worst) for of in groups_of.values())
        drawn = [row["drawn"] for row in ended]
        counted = (row for row in ended if row["advantage"] and math.isfinite(row["advantage"]))
        trained = [row["drawn"] for row in counted]
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
    if not every["ended"]:
        return groups, {}
    longest = max(*every["ended"], 2)
    edges = np.unique(np.geomspace(max(1, min(every["ended"])), longest + 1, 32).round())
    names = ("round", "10 %", "median", "90 %", "mean", "mean with an advantage")
    histograms = {name: np.histogram(of, edges)[0].tolist() for name, of in every.items()}
    shown = {"rounds": _columns(rows, names), "edges": edges.astype(int).tolist()}
    return groups, shown | histograms


def _prompts(traces: Traces) -> list[list[Any]]:
    """Return prompts: how often they were drawn, their mean reward the first and the last time."""
    drawn: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    if (table := traces.table("completions")).num_rows:
        table = table.select(["uid", "request", "reward"])  # texts are large
    for row in table.to_pylist():
        if row["reward"] is not None and math.isfinite(row["reward"]):
            drawn[row["uid"]][row["request"].rpartition("/")[0]].append(row["reward"])
    means = {uid: [rounded(fmean(of)) for of in groups.values()] for uid, groups in drawn.items()}
    often = sorted(means, key=lambda uid: -len(means[uid]))[:MOST_PROMPTS]
    return [[uid, len(means[uid]), means[uid][0], means[uid][-1]] for uid in often]


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


def _seconds_by_lane(traces: Traces) -> Json:
    """Return seconds of each round by what trainer and engines did."""
    rows = traces.rows("intervals")
    numbers = sorted({row["round"] for row in rows})
    engines = len({row["lane"] for row in rows} - {TRAINER})
    found: dict[str, dict[str, dict[int, float]]] = {"trainer": {}, "engines": {}}
    for row in rows:
        lane, share = ("trainer", 1) if row["lane"] == TRAINER else ("engines", engines)
        does = activity(row["what"], row["waits_for"])
        seconds = found[lane].setdefault(does, dict.fromkeys(numbers, 0.0))
        seconds[row["round"]] += (row["end"] - row["start"]) / share
    lanes = {
        lane: {does: [*map(rounded, seconds.values())] for does, seconds in of.items()}
        for lane, of in found.items()
    }
    return {"round": numbers, **lanes} if rows else {}


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
    note = f"`{path.name}`: {unreadable} of {lines} lines cannot be read."
    data = {"rounds": len(numbers), "of": len(sizes), "shown": len(shown), "in_them": len(rows)}
    return {**data, "columns": names, "rows": shown}, [note] if unreadable else []


def _rows_of(path: Path) -> Iterable[tuple[int | None, Json]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                number, row = read_row(line)
                yield number, {name: _cell(name, value) for name, value in row.items()}
            except (ValueError, TypeError, AttributeError):
                yield None, {}  # cut by a kill


def _bytes(cell: Any) -> int:
    return len(cell.encode("utf-8", "backslashreplace")) if isinstance(cell, str) else 8


def _cell(name: str, value: Any) -> Any:
    """Return a number, or text that is not too long."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return rounded(value)
    chat = isinstance(value, str) or name in ("prompt", "completion")
    text = as_text(value) if chat else json.dumps(value, ensure_ascii=False)
    if len(text) > MOST_TEXT_OF_ONE:
        text = f"{text[:MOST_TEXT_OF_ONE]} … ({len(text):,} characters)"
    return text
