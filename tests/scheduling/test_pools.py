import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.bubbles import bubble_ratio, decode, draw_lengths
from lit_rlsched.rollout.simulate.pools import pool_bubble_ratio, recommend_slots
from lit_rlsched.scheduling.sorted_batching import SortedRound

modes = st.sampled_from(["on_policy", "partial"])
orders = st.sampled_from(["fifo", "least_attained"])
targets = st.sampled_from([0.0, 0.03, 0.05, 0.2, 0.5])


@st.composite
def pools(draw):
    """Lengths of groups, how many prompts an update takes, and the limit of a completion."""
    width = draw(st.integers(1, 3))
    group = st.lists(st.integers(1, 12), min_size=width, max_size=width)
    lengths = draw(st.lists(group, min_size=1, max_size=12))
    return lengths, draw(st.integers(1, len(lengths))), draw(st.sampled_from([12, 17, 25, 40]))


def flat(lengths):
    return [length for group in lengths for length in group]


@settings(max_examples=3 * settings.default.max_examples)
@given(pools(), modes, orders, st.sampled_from(["group", "completion"]), st.integers(1, 14))
@example(([[2], [1], [1], [3]], 1, 12), "on_policy", "fifo", "completion", 2)  # a tie
@example(([[3, 1], [1, 3], [2, 2]], 1, 12), "on_policy", "fifo", "group", 3)  # drawn again
@example(([[9], [9], [9], [9]], 2, 12), "partial", "least_attained", "completion", 3)
def test_bubble_ratio_is_that_of_the_controller(pool, mode, order, unit, slots):
    lengths, update, limit = pool
    rule = SortedRound(update, len(lengths), len(lengths[0]), unit, mode)
    costs = {"step_time_base": 1.0, "per_running": 0, "per_kv_token": 0}
    drained = decode(lengths, rule, slots, order, limit, **costs)
    if unit == "completion":
        lengths, update = flat(lengths), update * len(lengths[0])
    ratio = pool_bubble_ratio(lengths, update, slots, mode, order, limit)
    assert ratio == bubble_ratio(drained.rounds)
    assert ratio == pytest.approx(drained.metrics["pool/bubble_ratio"], rel=1e-12)


@pytest.mark.parametrize("order", ["fifo", "least_attained"])
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_bubble_ratio_of_a_long_pool_is_that_of_the_controller(mode, order):
    lengths = np.random.default_rng(1).lognormal(4, 1, (64, 2)).clip(1, 400).astype(int).tolist()
    for unit, given_, update in (("group", lengths, 16), ("completion", flat(lengths), 32)):
        drained = decode(lengths, SortedRound(16, 64, 2, unit, mode), 24, order, 400)
        assert (drained.pauses > 0) == (order == "least_attained")
        ratio = pool_bubble_ratio(given_, update, 24, mode, order, 400)
        assert ratio == bubble_ratio(drained.rounds)


@given(pools(), modes, orders, targets)
def test_recommended_slots_idle_no_more_than_that(pool, mode, order, target):
    lengths, update, limit = pool
    most = len(flat(lengths))
    slots = recommend_slots(lengths, update, target, mode, order, limit)
    fits = [
        pool_bubble_ratio(lengths, update, q, mode, order, limit) <= target
        for q in range(1, most + 1)
    ]
    assert fits[slots - 1]
    assert slots == most or not fits[slots]
    if mode == "partial" and order == "fifo":
        assert not any(fits[slots:])


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), targets, st.integers(1, 10), orders)
@example([1] * 19 + [19], 0.5, 1, "fifo")  # the longest last: 37 of 3 * 25 idle
def test_slots_that_are_sure_in_any_order(lengths, target, update, order):
    sure = 1 + target / (1 - target) * sum(lengths) / max(lengths) * (1 - 1e-12)
    slots = recommend_slots(lengths, update, target, "partial", order, 200)
    assert slots >= min(len(lengths), int(sure))


@given(st.permutations(range(1, 25)), targets, st.sampled_from([4, 6, 8, 12]), orders)
def test_slots_that_are_sure_on_policy(lengths, target, update, order):
    # whole updates: none idles but the last, as long as there are no more slots than that
    sure = int(1 + target / (1 - target) * sum(lengths) / max(lengths) * (1 - 1e-12))
    for slots in range(1, min(sure, update) + 1):
        assert pool_bubble_ratio(lengths, update, slots, "on_policy", order, 24) <= target


def test_bubble_ratio_by_hand():
    # 3 and 1 run, then 4 for 2 steps; 4 goes on or begins anew, beside 2
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "partial") == 0
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([[3, 1], [4, 2]], 1, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 2, "on_policy") == 0  # one round
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 8, "on_policy") == 22 / 32  # slots without any


def test_bubble_ratio_of_turns_by_hand():
    def idle(update, mode, limit=16):
        return pool_bubble_ratio([4, 4, 8], update, 2, mode, "least_attained", limit)

    assert pool_bubble_ratio([4, 4, 8], 3, 2, "partial") == 8 / 24
    # turns of 2: 8 begins in step 2 beside the first 4, which ends in 4; the other goes on to 6
    assert idle(3, "partial") == idle(3, "on_policy") == 4 / 20
    assert idle(3, "partial", limit=64) == 8 / 24  # a turn of 8 is as long as they are
    # a first update of one: 8 has begun and goes on; or takes no turn, as it may be thrown away
    assert idle(1, "partial") == 4 / 20
    assert idle(1, "on_policy") == 8 / 24


def test_more_slots_may_idle_less_where_turns_are_taken():
    lengths = draw_lengths(0, 1200, 1.1)
    ratios = [
        pool_bubble_ratio(lengths, 128, q, "partial", "least_attained", 8192) for q in (40, 41, 42)
    ]
    assert ratios[0] <= 0.05 < ratios[1] and ratios[2] <= 0.05
    assert recommend_slots(lengths, 128, 0.05, "partial", "least_attained", 8192) == 42


def test_recommended_slots_by_hand():
    for mode in ("on_policy", "partial"):
        assert recommend_slots([7], 1, 0.0, mode) == 1
        assert recommend_slots([5] * 12, 12, 0.0, mode) == 12  # alike: none waits for another
        assert recommend_slots([5] * 12, 3, 0.0, mode) == 12
        assert recommend_slots([1, 1, 1, 9], 4, 0.0, mode) == 1
        assert recommend_slots([1, 1, 1, 9], 4, 0.49, mode) == 2  # 11 steps, 10 of 22 idle
        assert recommend_slots([9, 1, 1, 1], 4, 0.49, mode) == 2  # 9 steps, 6 of 18 idle
        assert recommend_slots([9, 1, 1, 1], 4, 0.34, mode) == 2
        assert recommend_slots([9, 1, 1, 1], 4, 0.9, mode) == 4
        assert recommend_slots(np.array([[9, 1], [1, 1]]), 1, 0.34, mode) >= 1
    # as much as the target is not too much
    assert pool_bubble_ratio([1] * 19, 19, 10, "partial") == 0.05
    assert recommend_slots([2, 1], 2, 0.25, "partial") == 2
    assert recommend_slots([2, 1], 2, 0.24, "partial") == 1


@pytest.mark.mostly_slow("partial-fifo")
@pytest.mark.parametrize("order", ["fifo", "least_attained"])
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_slots_for_four_thousand_completions(mode, order):
    lengths = np.ceil(np.random.default_rng(0).lognormal(math.log(1200), 1.1, 4096)).clip(max=8192)
    how = mode, order, 8192
    slots = recommend_slots(lengths, 1024, 0.05, *how)
    ratios = [pool_bubble_ratio(lengths, 1024, q, *how) for q in (slots, slots + 1)]
    assert ratios[0] <= 0.05 < ratios[1]
    assert recommend_slots(lengths.reshape(-1, 8), 128, 0.05, *how) == pytest.approx(slots, rel=0.1)
