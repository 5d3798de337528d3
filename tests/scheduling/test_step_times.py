"""Times of decode steps, fitted to simulated rollouts whose costs are known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.simulate.rounds import simulated_session
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.recorded_lengths import RecordedCompletions
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.scheduling.step_times import StepTimes
from lit_rlsched.scheduling.trace import RolloutTrace
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
