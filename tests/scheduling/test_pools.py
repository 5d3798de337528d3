"""Slots for a pool. The simulation is the round loop of a run, so figures by hand suffice."""

from hypothesis import example, given
from hypothesis import strategies as st

from lit_rlsched.simulation.loop import pool_bubble_ratio, recommend_slots

modes = st.sampled_from(["on_policy", "partial"])
targets = st.sampled_from([0.0, 0.03, 0.05, 0.2, 0.5])


@st.composite
def pools(draw):
    """Lengths of groups, how many prompts an update takes, and the limit of a completion."""
    width = draw(st.integers(1, 3))
    group = st.lists(st.integers(1, 12), min_size=width, max_size=width)
    lengths = draw(st.lists(group, min_size=1, max_size=12))
    return lengths, draw(st.integers(1, len(lengths))), draw(st.sampled_from([12, 17, 25, 40]))


@given(pools(), modes, targets)
def test_recommended_slots_idle_no_more_than_that(pool, mode, target):
    lengths, update, limit = pool
    slots = recommend_slots(lengths, update, target, mode, limit)

    def ratio(slots):
        return pool_bubble_ratio(lengths, update, slots, mode, limit)

    assert ratio(slots) <= target
    assert slots == sum(map(len, lengths)) or ratio(slots + 1) > target


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), targets, st.integers(1, 10))
@example([1] * 19 + [19], 0.5, 1)  # the longest last: 18 of 2 * 28 idle
def test_slots_that_are_sure_in_any_order(lengths, target, update):
    sure = int(1 + target / (1 - target) * sum(lengths) / max(lengths) * (1 - 1e-12))
    slots = min(len(lengths), sure)
    assert pool_bubble_ratio(lengths, update, slots, "partial", 200) <= target


def test_bubble_ratio_by_hand():
    # 3 and 1 run, then 4 for 2 steps; 4 goes on or begins anew, beside 2
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "partial") == 0
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([[3, 1], [4, 2]], 1, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 2, "on_policy") == 0  # one round
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 8, "on_policy") == 22 / 32  # slots without any
    assert pool_bubble_ratio([1] * 19, 19, 10, "partial") == 0.05


def test_recommended_slots_by_hand():
    for mode in ("on_policy", "partial"):
        assert recommend_slots([7], 1, 0.0, mode) == 1
        assert recommend_slots([5] * 12, 3, 0.0, mode) == 12  # alike: none waits for another
        assert recommend_slots([1, 1, 1, 9], 4, 0.49, mode) == 2  # 11 steps, 10 of 22 idle
        assert recommend_slots([9, 1, 1, 1], 4, 0.49, mode) == 2  # 9 steps, 6 of 18 idle
    # as much as the target is not too much
    assert recommend_slots([2, 1], 2, 0.25, "partial") == 2
    assert recommend_slots([2, 1], 2, 0.24, "partial") == 1
