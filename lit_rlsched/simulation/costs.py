"""What a run's steps cost: fitted to its traces, for simulations of other schedules."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from lit_rlsched.scheduling.timeline import DECODE, TRAINER, Span, union
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError, did_you_mean

Rows = Sequence[Mapping[str, Any]]
"""Rows of a table of the traces."""
WELL = 0.1
"""Relative error of the seconds of a round from which on a model does not fit."""
FEWER = 1.01
"""A model with fewer terms is taken if its squared error is at most this many times the least."""
FORWARD = 1 / 3
"""Share of a forward pass in the cost of an update's position: the backward pass is two of them.

If the engine's prefill takes longer, a forward pass is supposed to take as long: an update that had
nothing to compute tells nothing."""
GPUS = {
    "a100": (2.039e12, 3.12e14),  # of 80 GB
    "h100": (3.35e12, 9.89e14),
    "h200": (4.8e12, 9.89e14),
    "b200": (8e12, 2.25e15),  # an eighth of a DGX B200
    "l40s": (8.64e11, 3.62e14),
}
"""Bytes of memory and dense bfloat16 operations a second, from NVIDIA's data sheets (SXM)."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a decode step: `base + running * r + kv * tokens in the cache + prefill * new`."""

    base: float = 0.01
    running: float = 5e-5
    """For each request that runs."""
    kv: float = 2e-8
    """For each token in the key-value cache."""
    prefill: float = 0.0
    """For each prompt or prefix token of a new request."""
    cached: float = 0.0
    """Share that prefix caching spares of the prompts of siblings that the engine has begun in this
    round."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A linear model whose coefficients are 0 or more, and how well it fits."""

    name: str
    """What it gives the seconds of."""
    error: float
    """Median over the rounds of the relative error of a round's seconds; NaN without any round."""
    worst: float
    """Largest relative error of a round."""

    @property
    def fits(self) -> bool:
        """Whether rounds are predicted well enough to compare schedules."""
        return self.error <= WELL


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of all that a round does. The defaults make up an engine that nobody has measured.

    `calibrated` gives those of a run.
    """

    step: StepCosts = field(default_factory=StepCosts)
    update: float = 0.5
    """Seconds of each optimizer step, whatever its size."""
    position: float = 2e-4
    """Seconds of an update for each position: tokens of prompts and completions trained on."""
    verify: float = FORWARD * 2e-4
    """Seconds for each position of a pass that verifies drafts."""
    sync: float = 0.1
    """Seconds of a weight sync."""
    other: float = 0.1
    """Seconds of a round that are none of these."""
    trained_share: float = 1.0
    """Share of the completions that have an advantage other than 0. The update skips the others."""
    reward: tuple[float, ...] = (0.0,)
    """Durations of reward calls, drawn from at random."""
    reward_workers: int | None = 1
    """Calls at the same time; `None`: any number, as of functions that wait for a network."""
    fits: tuple[Fit, ...] = ()
    """The models that these figures come from."""


def computed(gpu: str, parameters: float, ranks: int, before: Costs) -> Costs:
    """Return costs in bfloat16, with a GPU for each engine and rank; what it does not decide stays.

    A decode step reads weights and cache at 85 % of the bandwidth, and the host needs 7 ms. Two
    operations for each token and parameter, at 40 % of what the GPU can do, are a forward pass,
    three of which are an update.
    """
    if gpu not in GPUS:
        near = did_you_mean(gpu, GPUS)
        raise UsageError(f"`--gpu {gpu}` is not known.{near} Use one of {', '.join(GPUS)}.")
    bandwidth, operations = GPUS[gpu]
    base = 7e-3 + 2 * parameters / (0.85 * bandwidth)
    kv = 1.6e-5 * parameters / (0.85 * bandwidth)  # bytes of a token: 131 KB in Llama 3 8B
    forward = 2 * parameters / (0.4 * operations)
    step = replace(before.step, base=base, running=1e-5, kv=kv, prefill=forward)
    costs = replace(before, step=step, update=0.05, sync=0.3, other=0.1, fits=())
    return replace(costs, position=forward / FORWARD / ranks, verify=forward / ranks)


def fitted(columns: Mapping[str, np.ndarray], seconds: np.ndarray) -> dict[str, float]:
    """Fit `seconds = sum of coefficient * column` by least squares, with coefficients of 0 or more.

    Of all sets of columns that give such coefficients, the smallest is taken whose error is about
    the least: a column that says the same as others gets 0.
    """
    names = [name for name, column in columns.items() if np.any(column)]
    scales = {name: float(np.abs(columns[name]).max()) for name in names}
    found: list[tuple[int, float, dict[str, float]]] = [(0, float(seconds @ seconds), {})]
    for number in range(1, len(names) + 1):
        for chosen in combinations(names, number):
            table = np.stack([columns[name] / scales[name] for name in chosen], axis=1)
            solved = np.linalg.lstsq(table, seconds, rcond=None)[0]
            if (solved >= 0).all():
                left = seconds - table @ solved
                values = (v / scales[n] for v, n in zip(solved.tolist(), chosen, strict=True))
                found.append((number, float(left @ left), dict(zip(chosen, values, strict=True))))
    enough = FEWER * min(error for _, error, _ in found) + 1e-12 * float(seconds @ seconds)
    _, _, terms = min((of for of in found if of[1] <= enough), key=lambda of: (of[0], of[1]))
    return {name: terms.get(name, 0.0) for name in columns}


def _errors(predicted: Mapping[int, float], measured: Mapping[int, float]) -> tuple[float, float]:
    """Median and maximum of the relative errors of the rounds that both have."""
    off = [abs(predicted[n] / measured[n] - 1) for n in predicted if measured.get(n)]
    return (float(np.median(off)), max(off)) if off else (float("nan"), float("nan"))


def step_fit(
    traces: Traces, intervals: Rows, began: Mapping[int, float | None], warm_up: int
) -> tuple[StepCosts, Fit]:
    """Fit the seconds of decode steps, with what passes between two of them.

    What engines do beside decoding, on the clock on which rounds `began`, does not count.
    """
    idle: dict[int, list[Span]] = {}
    for row in intervals:
        name = row["lane"].removeprefix("engine ")
        if name.isdigit() and row["what"] != DECODE:
            idle.setdefault(int(name), []).append((row["start"], row["end"]))
    idle = {engine: union(of) for engine, of in idle.items()}
    columns = {name: np.array(of) for name, of in traces.table("steps").to_pydict().items()}
    if not columns or not len(columns["steps"]):
        raise UsageError(
            f"`{traces.folder}` has no decode steps: engines with a virtual clock have no seconds. "
            "Give a run with `VLLMEngine` or `TransformersEngine`."
        )
    if (late := columns["round"] != warm_up).any():
        columns = {name: column[late] for name, column in columns.items()}
    names = ("decode_steps", "running", "kv_tokens", "prefill_tokens")
    figures = [columns[name].astype(float) for name in names]
    model = dict(zip(("base", "running", "kv", "prefill"), figures, strict=True))
    terms = fitted(model, columns["seconds"])
    gaps = []
    spans: dict[int, list[tuple[float, int, float]]] = {}
    for number in np.unique(columns["round"]).tolist():
        for engine in np.unique(columns["engine"]).tolist():
            at = (columns["round"] == number) & (columns["engine"] == engine)
            if at.any():
                seconds, steps = columns["seconds"][at].sum(), columns["steps"][at].sum()
                start, end = columns["start"][at].min(), columns["end"][at].max()
                span = end - start
                if (moment := began.get(number)) is not None:
                    start, end = start + moment, end + moment
                    rests = (min(end, b) - max(start, a) for a, b in idle.get(engine, ()))
                    span -= sum(max(0.0, rest) for rest in rests)
                gaps.append((span - seconds) / steps)
                steady = sum((terms[n] * model[n])[at].sum() for n in model)
                spans.setdefault(number, []).append((steady, steps, span))
    gap = max(0.0, float(np.median(gaps)))
    predicted = {n: max(steady + gap * steps for steady, steps, _ in of) for n, of in spans.items()}
    measured = {number: max(span for *_, span in of) for number, of in spans.items()}
    terms["base"] += gap
    return StepCosts(**terms), Fit("decode step", *_errors(predicted, measured))


def _trainer_seconds(rows: Rows) -> dict[str, dict[int, float]]:
    """Return the trainer's seconds of each round: updates, a sync, verification, other."""
    found = {what: dict[int, float]() for what in ("update", "weights", "verify", "other")}
    for row in rows:
        if row["lane"] != TRAINER or row["waits_for"]:
            continue
        what, number, seconds = row["what"], row["round"], row["end"] - row["start"]
        if what == "update":  # it ends in the next lap
            number -= 1
        into = found["update" if what == "gradients" else what if what in found else "other"]
        into[number] = seconds + (0.0 if what == "weights" else into.get(number, 0.0))
    return found


def update_fit(traces: Traces, seconds: Mapping[int, float]) -> tuple[float, float, Fit, float]:
    """Fit the seconds of updates to the positions that were trained on."""
    table, names = traces.table("completions"), ("round", "prompt_tokens", "tokens", "advantage")
    of = {name: np.array(table.column(name).to_pylist()) for name in (*names, "fate")}
    kept = np.isin(of["fate"], ("stop", "length"))
    trains = kept & (of["advantage"] != 0)
    sizes = (of["prompt_tokens"] + of["tokens"]) * trains
    numbers = [n for n in np.unique(of["round"]).tolist() if n in seconds]
    positions = np.array([sizes[of["round"] == n].sum() for n in numbers], float)
    measured = np.array([seconds[n] for n in numbers])
    share = float(trains.sum() / max(1, kept.sum()))
    iterations = traces.about.get("num_iterations", 1)
    steps = iterations * traces.about.get("steps_per_round", 1)
    if not len(numbers) or not positions.any():
        usual = _median({n: seconds[n] for n in numbers}) / steps  # with nothing to compute
        return usual, 0.0, Fit("update", float("nan"), float("nan")), share
    columns = {"update": np.full(len(numbers), float(steps)), "position": iterations * positions}
    if np.ptp(positions) < 0.05 * positions.max():
        del columns["update"]  # all of one size: that cannot be told from the rest
    terms = {"update": 0.0, **fitted(columns, measured)}
    predicted = steps * terms["update"] + terms["position"] * iterations * positions
    by_round = dict(zip(numbers, predicted.tolist(), strict=True))
    fit = Fit("update", *_errors(by_round, seconds))
    return terms["update"], terms["position"], fit, share


def verify_cost(rounds: Rows, completions: Rows, seconds: Mapping[int, float]) -> float | None:
    """Return the seconds for each position of a pass that verifies; `None`: none was measured.

    Drafts that are cut are read once more.
    """
    took = passes = 0.0
    for row in rounds:
        of, number = dict(row.get("metrics") or ()), row["round"]
        rows = [each for each in completions if each["round"] == number]
        if not rows or not of.get("drafts/tokens") or not seconds.get(number):
            continue
        tokens = max(1, sum(each["tokens"] for each in rows))
        positions = tokens + sum(each["prompt_tokens"] for each in rows)
        drafted = of["drafts/tokens"] / tokens
        took += seconds[number]
        passes += positions * (drafted + max(0.0, drafted - of["drafts/completed"] / len(rows)))
    return took / passes if passes else None


def _median(of: Mapping[int, float]) -> float:
    return float(np.median([*of.values()])) if of else 0.0


def calibrated(traces: Traces) -> Costs:
    """Return the costs of a run.

    The first round is left out where there are others: it warms up.
    """
    intervals, completions = traces.rows("intervals"), traces.rows("completions")
    of_rounds = traces.rows("rounds")
    began = {row["round"]: row.get("began") for row in of_rounds}
    first = min(began, default=0)
    step, fit = step_fit(traces, intervals, began, first)
    took = _trainer_seconds(intervals)
    groups = Counter(
        (row["request"].rpartition("/")[0], row["round"], row["prompt_tokens"])
        for row in completions
    )
    siblings = sum(tokens * (number - 1) for (*_, tokens), number in groups.items())
    cached = sum(traces.table("steps").column("cached_tokens").to_pylist())
    step = replace(step, cached=min(1.0, cached / siblings) if siblings else 0.0)
    if len(took["other"]) > 1:  # what comes after the last round ends the run
        took["other"].pop(max(began, default=first) + 1, None)
    for of in took.values():
        if len(of) > 1:
            of.pop(first, None)
    update, position, of_update, trained = update_fit(traces, took["update"])
    verify = verify_cost(of_rounds, completions, took["verify"])
    if verify is None:
        positions = sum(row["tokens"] + row["prompt_tokens"] for row in completions)
        share = (positions - siblings) / max(1, positions)  # a prompt is read once for its group
        reads = step.prefill * share / traces.about.get("ranks", 1)
        verify = max(FORWARD * position, reads)
    latencies = [*filter(None, (row["reward_seconds"] for row in completions))] or [0.0]
    return Costs(
        step,
        update,
        position,
        verify,
        _median(took["weights"]),
        _median(took["other"]),
        trained,
        tuple(sorted(latencies)),
        None if traces.about.get("async_rewards") else traces.about["reward_workers"],
        (fit, of_update),
    )
