"""Decode steps of a rollout, compared with earlier ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.step_times import LEAST_STEPS, StepSpeed
from lit_rlsched.scheduling.trace import RolloutTrace, Step


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 999)), min_size=1, max_size=5),
    st.lists(st.floats(0.2, 20), min_size=1, max_size=6),
)
def test_steps_are_compared_with_the_fastest_of_their_kind(
    shapes: list[tuple[int, int]], factors: list[float]
) -> None:
    speed, least = StepSpeed(), None
    for factor in factors:
        trace, now = RolloutTrace(slots=64), 0.0
        trace.admitted("a", now)
        for running, cached in shapes * LEAST_STEPS:
            trace.take(Step(now, now + running * factor, running, cached))
            trace.take(Step(now := now + running * factor, now + 1e6, running, cached, 1, 7))
            now += 1e6
        found = speed.times_as_long(trace)
        assert found == (None if least is None else pytest.approx(factor / least))
        least = min(factor, least or factor)


def test_few_steps_of_a_kind_are_not_compared() -> None:
    speed = StepSpeed()
    for steps, found in ((LEAST_STEPS, None), (LEAST_STEPS - 1, None), (LEAST_STEPS, 1.0)):
        trace = RolloutTrace(slots=4)
        trace.admitted("a", 0.0)
        for i in range(steps):
            trace.take(Step(float(i), i + 1.0, 3, 9))
        assert speed.times_as_long(trace) == found


def test_steps_of_different_kinds_are_not_compared() -> None:
    speed = StepSpeed()
    for running, cached, steps, found in (
        (3, 9, 1, None),
        (30, 9, 1, None),
        (3, 900, 1, None),
        (3, 9, 4, 1.0),  # four steps in one call, which takes four times as long
    ):
        trace = RolloutTrace(slots=64)
        trace.admitted("a", 0.0)
        for i in range(LEAST_STEPS):
            trace.take(Step(float(i * steps), float((i + 1) * steps), running, cached, steps))
        assert speed.times_as_long(trace) == found
