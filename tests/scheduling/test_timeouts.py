import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.rollpacker import AdaptiveTimeout


@pytest.mark.parametrize(
    ("anchor", "limit"), [(0.1, 2.0), (1.2, 2.0), (2.0, 3.0), (10.0, 15.0), (19.0, 28.5), (25, 30)]
)
def test_the_papers_table(anchor, limit):
    timeouts = AdaptiveTimeout(1.5, 2.0, 30.0)
    timeouts.observe("a", anchor, correct=True)
    assert timeouts.of("a") == pytest.approx(limit)
    assert timeouts.of("b") == 30.0


def test_a_scoring_time_below_a_second_counts():
    timeouts = AdaptiveTimeout(1.0, 0.1, 30.0)
    timeouts.observe("a", 0.5, correct=True)
    assert timeouts.of("a") == 0.5


def test_what_is_wrong_moves_nothing():
    timeouts = AdaptiveTimeout(1.5, 2.0, 30.0)
    timeouts.observe("a", 29.0, correct=False)
    assert timeouts.of("a") == 30.0
    timeouts.observe("a", 4.0, correct=True)
    timeouts.observe("a", 29.0, correct=False)
    assert timeouts.of("a") == 6.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans())), st.floats(1, 3))
def test_limits_stay_within_bounds_and_never_fall_below_a_correct_run(seen, scale):
    timeouts, most, last, known = AdaptiveTimeout(scale, 2.0, 30.0), 0.0, 0.0, False
    for seconds, correct in seen:
        timeouts.observe("a", seconds, correct)
        known |= correct
        most = max(most, seconds if correct else 0.0)
        limit = timeouts.of("a")
        assert 2.0 <= limit <= 30.0
        if known:
            assert limit >= min(most, 30.0) and limit >= last
            last = limit
        else:
            assert limit == 30.0
    again = AdaptiveTimeout(scale, 2.0, 30.0)
    again.load_state_dict(timeouts.state_dict())
    assert again.of("a") == timeouts.of("a")
