"""What a run's steps cost: fitted to its traces, for simulations of other schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from lit_rlsched.scheduling.trace_files import Tables
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.decoder import StepCosts

WELL = 0.1
"""Relative error of the seconds of a round from which on a model does not fit."""
FEWER = 1.01
"""A model with fewer terms is taken if its squared error is at most this many times the least."""
FORWARD = 1 / 3
"""Share of a forward pass in the cost of an update's position: the backward pass is two of them."""
MOST_LATENCIES = 10_000


@dataclass(frozen=True, slots=True)
class Fit:
    """A linear model whose coefficients are 0 or more, and how well it fits."""

    name: str
    """What it gives the seconds of."""
    terms: Mapping[str, float]
    """Seconds for each unit."""
    observations: int
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

    @property
    def tail(self) -> tuple[float, float, float, float]:
        """Median, 95th and 99th percentile and maximum of the seconds of a reward."""
        points = np.quantile(self.reward, [0.5, 0.95, 0.99, 1.0])
        return tuple(points.tolist())


def fitted(columns: Mapping[str, np.ndarray], seconds: np.ndarray) -> dict[str, float]:
    """Fit `seconds = sum of coefficient * column` by least squares, with coefficients of 0 or more.

    Of all sets of columns that give such coefficients, the smallest is taken whose error is about
    the least: a column that says the same as others gets 0.

    Args:
        columns: `[N]` each.
        seconds: `[N]`.

    Returns:
        A coefficient for each column.
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
    least = min(error for _, error, _ in found)
    enough = FEWER * least + 1e-12 * float(seconds @ seconds)
    _, _, terms = min((of for of in found if of[1] <= enough), key=lambda of: (of[0], of[1]))
    return {name: terms.get(name, 0.0) for name in columns}


def _errors(predicted: Mapping[int, float], measured: Mapping[int, float]) -> tuple[float, float]:
    """Median and maximum of the relative errors of the rounds that both have."""
    off = [abs(predicted[n] / measured[n] - 1) for n in predicted if measured.get(n)]
    return (float(np.median(off)), max(off)) if off else (float("nan"), float("nan"))


def step_fit(traces: Tables, warm_up: int = 0) -> tuple[StepCosts, Fit]:
    """Fit the seconds of decode steps, with what passes between two of them.

    Args:
        traces: Tables of a run.
        warm_up: Number of a round that is left out, if there are others.

    Raises:
        UsageError: no round has steps.
    """
    columns = {name: np.array(of) for name, of in traces.table("steps").to_pydict().items()}
    if not columns or not len(columns["steps"]):
        raise UsageError(
            f"`{traces.folder}` has no decode steps: engines with a virtual clock have no seconds. "
            "Give a run with `VLLMEngine` or `TransformersEngine`."
        )
    if (late := columns["round"] != warm_up).any():
        columns = {name: column[late] for name, column in columns.items()}
    plain = columns["proposed"] == 0  # draft tokens would be another term
    if not plain.any():
        raise UsageError(
            f"`{traces.folder}`: every decode step has draft tokens, so what a plain one costs is "
            "not known. Give a run without `Speculation`."
        )
    model = {
        "base": columns["decode_steps"],
        "running": columns["running"],
        "kv": columns["kv_tokens"],
        "prefill": columns["prefill_tokens"],
    }
    fits = {name: column[plain].astype(float) for name, column in model.items()}
    terms = fitted(fits, columns["seconds"][plain])
    predicted: dict[int, float] = {}
    measured: dict[int, float] = {}
    gaps = []
    spans: dict[int, list[tuple[float, int, float]]] = {}
    for number in np.unique(columns["round"]).tolist():
        for engine in np.unique(columns["engine"]):
            at = (columns["round"] == number) & (columns["engine"] == engine)
            if at.any():
                seconds, steps = columns["seconds"][at].sum(), columns["steps"][at].sum()
                span = columns["end"][at].max() - columns["start"][at].min()
                gaps.append((span - seconds) / steps)
                steady = sum(terms[n] * model[n][at].sum() for n in model)
                spans.setdefault(number, []).append((steady, steps, span))
    gap = float(np.median(gaps))
    for number, of_engines in spans.items():
        predicted[number] = max(steady + gap * steps for steady, steps, _ in of_engines)
        measured[number] = max(span for *_, span in of_engines)
    terms["base"] += gap
    error, worst = _errors(predicted, measured)
    fit = Fit("decode step", terms, int(columns["steps"].sum()), error, worst)
    return StepCosts(terms["base"], terms["running"], terms["kv"], terms["prefill"]), fit


@dataclass(slots=True)
class _Rounds:
    """Seconds of each round by what was done, from the intervals of the trainer."""

    update: dict[int, float] = field(default_factory=dict)
    """Of the round's update, which ends in the next lap."""
    sync: dict[int, float] = field(default_factory=dict)
    verify: dict[int, float] = field(default_factory=dict)
    other: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "_Rounds":
        self = cls()
        for row in rows:
            number, seconds = row["round"], row["end"] - row["start"]
            if row["lane"] != "trainer" or row["waits_for"]:
                continue
            if row["what"] in ("update", "gradients"):
                number -= row["what"] == "update"
                into = self.update
            else:
                into = {"weights": self.sync, "verify": self.verify}.get(row["what"], self.other)
            into[number] = into.get(number, 0.0) + seconds
        return self


def update_fit(traces: Tables, seconds: Mapping[int, float]) -> tuple[float, float, Fit, float]:
    """Fit the seconds of updates to the positions that were trained on.

    Returns:
        Seconds of each optimizer step, seconds of each position, the fit, and the share of the
        completions that have an advantage other than 0.
    """
    table = traces.table("completions")
    of = {name: np.array(table.column(name).to_pylist()) for name in table.column_names}
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
        return usual, 0.0, Fit("update", {}, 0, float("nan"), float("nan")), share
    columns = {"update": np.full(len(numbers), float(steps)), "position": iterations * positions}
    if np.ptp(positions) < 0.05 * positions.max():
        del columns["update"]  # all of one size: that cannot be told from the rest
    terms = {"update": 0.0, **fitted(columns, measured)}
    predicted = steps * terms["update"] + terms["position"] * iterations * positions
    by_round = dict(zip(numbers, predicted.tolist(), strict=True))
    fit = Fit("update", terms, len(numbers), *_errors(by_round, seconds))
    return terms["update"], terms["position"], fit, share


def _median(of: Mapping[int, float]) -> float:
    return float(np.median([*of.values()])) if of else 0.0


def cached_share(traces: Tables) -> float:
    """Return the share of the siblings' prompt tokens that the engine had in its cache."""
    could: dict[str, list[int]] = {}
    for row in traces.rows("completions"):
        name = f"{row['request'].rpartition('/')[0]} {row['round']}"
        could.setdefault(name, []).append(row["prompt_tokens"])
    siblings = sum(sum(of[1:]) for of in could.values())
    cached = sum(traces.table("steps").column("cached_tokens").to_pylist())
    return min(1.0, cached / siblings) if siblings else 0.0


def calibrated(traces: Tables) -> Costs:
    """Return the costs of a run.

    The first round is left out where there are others: it warms up.

    Raises:
        UsageError: the traces have no decode steps.
    """
    rounds = _Rounds.of(traces.rows("intervals"))
    first = min([*rounds.other, *rounds.sync], default=0)
    step, fit = step_fit(traces, first)
    step = replace(step, cached=cached_share(traces))
    for of in (rounds.update, rounds.sync, rounds.verify, rounds.other):
        if len(of) > 1:
            of.pop(first, None)
    update, position, of_update, share = update_fit(traces, rounds.update)
    table = traces.table("completions")
    latencies = [*filter(None, table.column("reward_seconds").to_pylist())] or [0.0]
    every = -(-len(latencies) // MOST_LATENCIES)
    return Costs(
        step,
        update,
        position,
        FORWARD * position,
        _median(rounds.sync),
        _median(rounds.other),
        share,
        tuple(sorted(latencies)[::every]),
        None if traces.about.get("async_rewards") else traces.about["reward_workers"],
        (fit, of_update),
    )
