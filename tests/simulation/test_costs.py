import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.scheduling.trace_files import Traces, TraceWriter
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.costs import (
    FORWARD,
    Costs,
    StepCosts,
    calibrated,
    computed,
    fitted,
    verify_cost,
)
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.training.schedule import Schedule


@given(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=3, max_size=3), st.integers(0, 99))
def test_exact_coefficients_are_found(coefficients, seed):
    """Terms of about the same size; columns have scales of their own."""
    chance = np.random.default_rng(seed)
    coefficients = [c / scale for c, scale in zip(coefficients, (1, 1e3, 1e6), strict=True)]
    columns = {
        name: chance.random(40) * scale for name, scale in zip("abc", (1, 1e3, 1e6), strict=True)
    }
    seconds = sum(c * of for c, of in zip(coefficients, columns.values(), strict=True))
    found = fitted(columns, seconds)
    assert [*found.values()] == pytest.approx(coefficients, rel=1e-6, abs=1e-12)


def test_no_coefficient_is_below_zero_and_equals_are_not_split():
    ones, up = np.ones(20), np.arange(20.0)
    found = fitted({"base": ones, "running": up, "kv": 2 * up}, 5 + 3 * up)
    assert found["base"] == pytest.approx(5)
    assert sorted([found["running"], 2 * found["kv"]]) == pytest.approx([0, 3])
    assert fitted({"base": ones, "falls": up}, 40 - up)["falls"] == 0
    assert fitted({"base": ones, "never": 0 * ones}, 2 * ones) == pytest.approx(
        {"base": 2, "never": 0}
    )


COSTS = StepCosts(0.02, 0.001, 1e-6, 2e-5)


def write_run(folder, noise=0.0, updates=(3e-4, 0.5), advantage=1.0, wobble=0.0, waits=0.0):
    """A run of six rounds whose seconds follow from known costs.

    Before each step the engine waits for so many seconds.
    """
    chance = np.random.default_rng(0)
    writer = TraceWriter(folder / "traces")
    writer.begin(1, {"reward_workers": 2, "max_completion_length": 400})
    for number in range(1, 7):
        lengths = chance.integers(5, 300, 20)
        trace, now, pauses = RolloutTrace(8), 0.0, []
        running: dict[int, int] = {}
        left = [*enumerate(lengths.tolist())]
        while left or running:
            admitted = [left.pop(0) for _ in range(min(len(left), 8 - len(running)))]
            running |= dict(admitted)
            cached = sum(30 + lengths[i] - rest for i, rest in running.items())
            took = COSTS.base + COSTS.running * len(running) + COSTS.kv * cached
            took += COSTS.prefill * 30 * len(admitted)
            took *= math.exp(noise * chance.normal()) * (1 + wobble * (number % 2))
            if waits and now:  # the trace begins with the first step
                pauses.append((now, now + waits))
                now += waits
            ended = {str(i): int(lengths[i]) for i, rest in running.items() if rest == 1}
            step = Step(now, now + took, len(running), cached, prefill_tokens=30 * len(admitted))
            step.admitted, step.left = [str(i) for i, _ in admitted], ended
            trace.take(step)
            now += took
            running = {i: rest - 1 for i, rest in running.items() if rest > 1}
        positions = int((lengths + 30).sum())
        whats = {
            "weights": 0.25,
            "rollout": trace.seconds,
            "other": 0.125 + number / 1000,
            "update": updates[0] * positions + updates[1],
        }
        at, rows = 0.0, []
        for what, took in whats.items():
            whom = "engines" if what == "rollout" else None
            rows.append(("trainer", what, at, at + took, whom))
            at += took
        began = 1e4 * number  # on the run's clock
        rows[:-1] = [(lane, what, began + a, began + b, w) for lane, what, a, b, w in rows[:-1]]
        rows[:0] = [("engine 0", "wait", began + a, began + b, "trainer") for a, b in pauses]
        names = ("lane", "what", "start", "end", "waits_for")
        table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows[:-1]])
        update = pa.Table.from_pylist([dict(zip(names, rows[-1], strict=True))])
        completions = [
            {
                "request": f"p{number}@0/{i}",
                "prompt_tokens": 30,
                "tokens": n,
                "drawn": n,
                "advantage": advantage,
                "reward_seconds": 0.1 * (i + 1),
                "fate": "stop",
            }
            for i, n in enumerate(lengths.tolist())
        ]
        writer.add(
            number,
            {
                **trace.tables(),
                "completions": pa.Table.from_pylist(completions),
                "intervals": table,
                "rounds": pa.table({"slots": [8], "began": [began]}),
            },
        )
        writer.add(number + 100, {"intervals": update})  # laps that follow the rounds
    return Traces(folder)


def moved(traces):
    """The traces, with each update in the lap after its round."""
    rows = traces.rows("intervals")
    for row in rows:
        if row["round"] > 100:
            row["round"] -= 99
    traces.rows = lambda name: rows if name == "intervals" else Traces.rows(traces, name)
    return traces


def test_the_costs_of_a_run_are_found(tmp_path):
    costs = calibrated(moved(write_run(tmp_path)))
    assert costs.step == pytest.approx(COSTS) or [
        costs.step.base,
        costs.step.running,
        costs.step.kv,
        costs.step.prefill,
    ] == pytest.approx([COSTS.base, COSTS.running, COSTS.kv, COSTS.prefill], rel=0.02)
    assert (costs.position, costs.update) == pytest.approx((3e-4, 0.5), rel=1e-6)
    assert costs.verify == FORWARD * costs.position
    assert costs.sync == pytest.approx(0.25) and costs.other == pytest.approx(0.129, abs=2e-3)
    assert costs.reward_workers == 2 and max(costs.reward) == pytest.approx(2.0)
    assert all(fit.fits and fit.error < 1e-3 for fit in costs.fits)


def test_an_engine_that_waits_in_a_round_takes_no_longer(tmp_path):
    costs = calibrated(moved(write_run(tmp_path, waits=0.3)))
    assert costs.step.base == pytest.approx(COSTS.base, rel=0.02) and costs.fits[0].error < 0.01


def test_the_cost_of_a_verification_is_found():
    """All have drafts, and the quarter that is cut is read twice."""
    rows = [{"round": 2, "prompt_tokens": 10, "tokens": 20} for _ in range(4)]
    metrics = {"drafts/tokens": 80.0, "drafts/completed": 3.0}
    rounds = [{"round": n, "metrics": metrics} for n in (1, 2)]
    found = verify_cost(rounds, rows, {1: 5.0, 2: 6.0})
    assert found == pytest.approx(6.0 / (4 * 30 * 1.25))
    assert verify_cost(rounds, rows, {2: 0.0}) is None


def test_noise_is_told_and_seconds_without_a_law_do_not_fit(tmp_path):
    noisy = calibrated(moved(write_run(tmp_path / "a", noise=0.2))).fits[0]
    assert noisy.error > 0 and noisy.worst < 0.1 and noisy.fits
    wild = calibrated(moved(write_run(tmp_path / "b", wobble=1.0))).fits[0]
    assert not wild.fits


def test_a_run_whose_rewards_are_all_equal_has_no_update_to_fit(tmp_path):
    traces = moved(write_run(tmp_path, advantage=0.0))
    costs = calibrated(traces)
    assert costs.trained_share == 0 and math.isnan(costs.fits[1].error)
    # a pass that verifies takes as long as a prefill that reads a prompt once for its completions
    rows = Traces.rows(traces, "completions")
    tokens, groups = sum(row["tokens"] for row in rows), 6
    share = (tokens + 30 * groups) / (tokens + 30 * len(rows))
    assert costs.verify == pytest.approx(costs.step.prefill * share) and costs.step.prefill > 0


def test_computed_costs_are_those_of_the_data_sheet():
    """An H100 reads 3 GB of weights, and 24 KB of cache for a token, at 85 % of 3.35 TB/s."""
    costs = computed("h100", 1.5e9, 2, Costs(reward=(2.0,)))
    step, passes = (costs.step.base, costs.step.kv), (costs.step.prefill, costs.position)
    assert step == pytest.approx((7e-3 + 3e9 / 2.85e12, 24e3 / 2.85e12), rel=0.01)
    assert passes == pytest.approx((3e9 / 4e14, 3 * 3e9 / 4e14 / 2), rel=0.02)
    assert costs.reward == (2.0,)


def test_a_run_without_steps_is_refused(tmp_path):
    TraceWriter(tmp_path / "traces").begin(1, {})
    with pytest.raises(UsageError, match="no decode steps"):
        calibrated(Traces(tmp_path))


def test_fitted_costs_give_the_seconds_of_other_slots(tmp_path):
    """Costs from 8 slots, and the seconds of 3 slots by the costs that made them."""
    found = calibrated(moved(write_run(tmp_path))).step
    seconds = []
    for costs in (COSTS, found):
        work = Workload([[40], [7], [99], [300], [12], [5], [60]], [30] * 7, 400)
        pipeline = Pipeline(Schedule(FullRound(7)), work, Costs(costs), Machine(3), 1)
        seconds.append(pipeline.run(1).rounds[0].decoding)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)
