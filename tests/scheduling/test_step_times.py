"""Times of decode steps, fitted to simulated rollouts whose costs are known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.recorded_lengths import RecordedCompletions
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.scheduling.step_times import LEAST_STEPS, StepTimes
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.simulation.loop import simulated_session
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def rollout(seed: int, slots: int, drafting: Drafting | None) -> RolloutTrace:
    """The trace of some completions that repeat each other, at 1 + 0.25 seconds per position."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(9, 99) for _ in range(5)] for _ in range(4)]
    texts = {
        f"g/{i}": [token for phrase in rng.choices(phrases, k=8) for token in phrase]
        for i in range(12)
    }
    engine = SimulatedEngine(
        RecordedCompletions(texts), step_time_base=1.0, per_running=0.25, per_kv_token=0.0
    )
    session = simulated_session(engine, slots, 42, lambda: Admission(slots), drafting=drafting)
    completions = [Completion(i) for i in range(len(texts))]
    group = Group("g", Prompt("g", "x", (5, 6)), Sampling(40), completions)
    assert [*session.rollout([group], 0)] == [group]
    return session.trace


@given(st.integers(0, 99), st.integers(2, 5))
def test_the_costs_are_found(seed: int, slots: int) -> None:
    times = StepTimes.fit(rollout(seed, slots, Drafting(3, slots)))
    assert times is not None
    assert times.draft == pytest.approx(0.25)
    assert times.base + times.request * slots == pytest.approx(1 + 0.25 * slots)


@given(st.integers(0, 99), st.integers(1, 4), st.sampled_from([1, 3]))
def test_the_seconds_saved_are_those_of_two_rollouts(seed: int, slots: int, tokens: int) -> None:
    plain, drafted = rollout(seed, slots, None), rollout(seed, slots, Drafting(tokens, slots))
    times = StepTimes.fit(drafted)
    assert times is not None
    assert times.saved(drafted) == pytest.approx(plain.seconds - drafted.seconds)
    assert StepTimes.fit(plain) is None


def recorded(times: StepTimes, seed: int, drafted: int, even: bool = False) -> RolloutTrace:
    """A trace of steps that take these times, and of others that take any.

    Args:
        times: Of a step.
        seed: Of what runs.
        drafted: Number of steps with draft tokens.
        even: Whether each step that counts has two draft tokens for each request.
    """
    rng = random.Random(seed)
    others = ["prompts", "idle"] if even else ["prompts", "idle", "plain"]
    kinds = ["drafted"] * drafted + others * 12
    rng.shuffle(kinds)
    trace, now = RolloutTrace(slots=8), 0.0
    trace.admitted("a", now)
    for kind in kinds:
        running, kv_tokens = rng.randint(1, 8), rng.randint(8, 99)
        draft_tokens = {"drafted": 2 * running if even else rng.randint(1, 12)}.get(kind, 0)
        steps = rng.randint(1, 4) if kind == "plain" else 1
        took = times.base + times.request * running
        took = steps * (took + times.cached * kv_tokens + times.draft * draft_tokens)
        step = Step(now, now + took, running, kv_tokens, steps, proposed=draft_tokens)
        if kind in ("prompts", "idle"):
            step.end = now + rng.uniform(5, 50)
        if kind == "prompts":
            step.prefill_tokens = 99
        if kind == "idle":
            step.running = step.kv_tokens = step.decode_steps = 0
        trace.take(step)
        now = step.end
    return trace


costs = st.integers(1, 16).map(lambda n: n / 8)


@given(st.builds(StepTimes, costs, costs, costs, costs), st.integers(0, 99))
def test_steps_that_compute_prompts_or_nothing_do_not_count(times: StepTimes, seed: int) -> None:
    found = StepTimes.fit(recorded(times, seed, 20))
    assert found is not None
    for name in ("base", "request", "cached", "draft"):
        assert getattr(found, name) == pytest.approx(getattr(times, name)), name


@pytest.mark.parametrize("missing", [0, 1])
def test_times_are_fitted_to_enough_steps_with_draft_tokens(missing: int) -> None:
    few = StepTimes.fit(recorded(StepTimes(1.0, 0.5, 0.25, 0.5), 0, LEAST_STEPS - missing))
    assert (few is None) == bool(missing)


@given(st.integers(0, 99))
def test_nothing_is_fitted_if_each_request_always_has_as_many_draft_tokens(seed: int) -> None:
    assert StepTimes.fit(recorded(StepTimes(1.0, 0.5, 0.25, 0.5), seed, 20, even=True)) is None


def test_the_seconds_saved_by_hand() -> None:
    trace = RolloutTrace(slots=2)
    first = Step(0.0, 1.0, 2, 8, proposed=4, accepted=2, admitted=["a", "b"], left={"b": 1})
    trace.take(first)
    trace.take(Step(1.0, 2.0, 1, 10, proposed=3, accepted=1))
    trace.take(Step(2.0, 3.0, 1, 30, left={"a": 6}))
    assert (trace.plain_steps, trace.decode_steps) == (6, 3)
    context = (8 + 10) / (2 + 1)  # of the steps with draft tokens
    expected = 2.0 * (6 - 3) + (0.5 + 0.125 * context) * 3 - 0.25 * 7
    assert StepTimes(2.0, 0.5, 0.125, 0.25).saved(trace) == expected
