import math

import pytest

from lit_rlsched.scheduling.down_sampling import informative

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "tells"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([1.0], False),
        ([], False),
        ([NAN, NAN], False),
        ([NAN, 1.0], False),
        ([NAN, 1.0, 2.0], True),
        ([NAN, 2.0, 2.0], False),
        ([0.0, 1.3e-8], False),  # a deviation of 0.92e-8
        ([0.0, 1.5e-8], True),  # of 1.06e-8
        ([0.0, 1e-8 * math.sqrt(2)], True),  # of 1e-8
        ([-1e-8, 0.0, 1e-8], True),  # exactly of 1e-8
        ([-1e300, 1e300], True),
    ],
)
def test_who_has_an_advantage_over_whom(rewards, tells):
    assert informative(rewards) is tells


@pytest.mark.filterwarnings("error")
def test_neither_large_rewards_nor_a_single_one_are_a_reason_to_warn():
    assert informative([-1e308, 1e308])
    assert not informative([1.0])
