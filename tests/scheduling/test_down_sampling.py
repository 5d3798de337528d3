import math
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lit_rlsched.scheduling.down_sampling import (
    RULES,
    Rule,
    max_reward,
    max_variance,
    percentile,
    random,
)

NAN = math.nan
rules = st.sampled_from(list(RULES.values()))
by_value = st.sampled_from([max_variance, max_reward, percentile])


@st.composite
def groups(draw, longest=12):
    """Rewards of one group, and how many to keep."""
    reward = draw(
        st.sampled_from(
            [
                st.integers(0, 1),
                st.integers(-3, 3),
                st.sampled_from([0.0, 0.1, 0.25, 1.1, 1.25, 2.1]),
                st.floats(-5, 5),
                st.floats(allow_nan=False, allow_infinity=False),
                st.sampled_from([1e9, 1e9 + 1e-6, 1e9 + 1e-3, 1e9 + 0.3, 1e9 + 0.7, 1e9 + 1]),
                st.sampled_from([-1.7e308, -1e308, 1.0, 1e307, 1.7e308]),
                st.sampled_from([0.0, 5e-324, 1e-323, 1e-320, 3e-308]),
            ]
        )
    )
    rewards = draw(st.lists(reward, min_size=1, max_size=longest))
    if draw(st.integers(0, 9)) == 0:
        rewards = [rewards[0]] * len(rewards)
    return rewards, draw(st.integers(1, len(rewards)))


@st.composite
def partly_scored(draw):
    """Rewards `[P, n]` with ties and NaN, and how many to keep."""
    n = draw(st.integers(1, 8))
    reward = st.sampled_from([NAN, -1.0, 0.0, 0.5, 1.0, 2.0])
    rows = draw(st.lists(st.lists(reward, min_size=n, max_size=n), max_size=5))
    return np.array(rows).reshape(-1, n), draw(st.integers(1, n))


def spread(rewards):
    """Their variance as an exact integer, in units that the same floats share."""
    return len(rewards) * sum(r * r for r in rewards) - sum(rewards) ** 2


def exact(rewards):
    """Integers in the ratios of the floats."""
    unit = max(float(r).as_integer_ratio()[1] for r in rewards)  # powers of two
    return [n * (unit // d) for n, d in (float(r).as_integer_ratio() for r in rewards)]


def at(values, indices):
    return [values[i] for i in indices]


@settings(max_examples=3 * settings.default.max_examples)
@given(groups())
@example(([1e9 + i * 1e-7 for i in range(12)], 5))
@example(([-1.7e308, 1.7e308, 0.0, 1.7e308], 2))
def test_variance_is_the_largest_of_all_subsets(group):
    rewards, keep = group
    values = exact(rewards)
    best = max(spread(subset) for subset in combinations(values, keep))
    chosen = spread(at(values, max_variance(rewards, keep)))
    assert chosen == best or chosen * 10**11 >= best * (10**11 - 1)


@given(partly_scored(), rules)
def test_indices_are_distinct_ascending_and_scored(case, rule):
    rewards, keep = case
    rewards.flags.writeable = False
    result = rule(rewards, keep)
    assert result.shape == (len(rewards), keep) and result.dtype == np.int64
    for row, chosen in zip(rewards, result.tolist(), strict=True):
        scored = np.flatnonzero(~np.isnan(row)).tolist()
        taken = min(keep, len(scored))
        assert chosen[taken:] == [-1] * (keep - taken)
        assert chosen[:taken] == sorted(set(chosen[:taken])) and set(chosen[:taken]) <= {*scored}
        if len(scored) <= keep:
            assert chosen[:taken] == scored


@given(partly_scored(), by_value)
def test_groups_do_not_touch_each_other(case, rule):
    rewards, keep = case
    result = rule(rewards, keep)
    for row, chosen in zip(rewards, result, strict=True):
        alone = rule(row, keep)
        assert alone.shape == (keep,) and (alone == chosen).all()
        scored = np.flatnonzero(~np.isnan(row))
        if len(scored) >= keep:  # as if the rest had not been drawn
            assert (scored[rule(row[scored], keep)] == chosen).all()


@given(partly_scored(), by_value)
def test_of_equal_rewards_the_first_are_taken(case, rule):
    rewards, keep = case
    for row, chosen in zip(rewards, rule(rewards, keep).tolist(), strict=True):
        for reward in {row[i] for i in chosen if i >= 0}:
            alike = np.flatnonzero(row == reward).tolist()
            taken = [i for i in chosen if i in alike]
            assert taken == alike[: len(taken)]


def test_a_rule_has_a_name_and_a_function():
    assert [*RULES] == [*get_args(Rule)]


def test_rules_by_hand():
    rewards = [0.5, 3.0, 1.0, 0.0, 2.0, 9.0, 2.5, 1.5]
    assert max_variance(rewards, 2).tolist() == [3, 5]
    assert max_variance(rewards, 3).tolist() == [0, 3, 5]
    assert max_variance(rewards, 1).tolist() == [3]  # no variance: the fewest of the highest
    assert max_reward(rewards, 3).tolist() == [1, 5, 6]
    # in order 0 .5 1 1.5 2 2.5 3 9
    assert percentile(rewards, 1).tolist() == [4]  # the upper of the two in the middle
    assert percentile(rewards, 3).tolist() == [0, 1, 4]  # 8/6, 24/6, 40/6: .5, 2 and 3
    assert percentile(rewards, 4).tolist() == [0, 5, 6, 7]  # .5, 1.5, 2.5 and 9
    assert percentile([7, 7, 0, 7], 2).tolist() == [0, 1]
    assert percentile([NAN, 3, 1, NAN, 2], 1).tolist() == [4]
    for rule in (max_variance, max_reward, percentile):
        assert rule([4.0] * 6, 3).tolist() == [0, 1, 2]
        assert rule([[1, NAN], [NAN, NAN], [2, 1]], 2).tolist() == [[0, -1], [-1, -1], [0, 1]]
        assert rule(np.zeros((0, 4)), 2).shape == (0, 2)
    assert max_reward([1, 2, 2, NAN, 2], 2).tolist() == [1, 2]
    assert max_variance([0, 1, 10, NAN], 2).tolist() == [0, 2]


def test_of_equal_variances_the_most_balanced_is_taken():
    assert max_variance([0, 0, 0, 1, 2, 3], 4).tolist() == [0, 1, 4, 5]  # as much as 0 0 0 3
    assert max_variance([0, 0, 1, 1, 1], 3).tolist() == [0, 1, 2]  # as much as 0 1 1
    for step in (0.1, 0.3, 0.7):  # floats whose variances differ by rounding
        for shift in (0, 0.1, 0.2, 1 / 3):
            rewards = np.arange(8) * step + shift
            assert max_variance(rewards, 3).tolist() == [0, 1, 7]
            assert max_variance(rewards, 5).tolist() == [0, 1, 2, 6, 7]
    single = (np.arange(5) * 0.1).astype(np.float32)  # counted in double precision
    assert max_variance(single, 3).tolist() == max_variance(single.tolist(), 3).tolist()


def test_random_is_uniform_over_the_scored():
    rewards = np.tile([0.0, NAN, 1.0, 2.0, NAN, 5.0, 5.0], (50_000, 1))
    sets, counts = np.unique(random(rewards, 2, seed=5), axis=0, return_counts=True)
    assert sets.tolist() == [list(pair) for pair in combinations([0, 2, 3, 5, 6], 2)]
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 27.9  # 9 degrees of freedom: one in a thousand


def test_random_can_be_repeated():
    rewards = np.zeros((20, 30))
    assert (random(rewards, 7) == random(rewards, 7, seed=0)).all()
    assert (random(rewards, 7, seed=1) != random(rewards, 7, seed=2)).any()
    assert (random(rewards, 7, seed=[4, 2]) == random(rewards + 1, 7, seed=[4, 2])).all()
    generator = np.random.default_rng(0)
    first = random(rewards, 7, generator)
    assert (first == random(rewards, 7)).all() and (first != random(rewards, 7, generator)).any()


@pytest.mark.parametrize("rule", RULES.values())
def test_an_infinite_reward_is_no_score(rule):
    infinite = [[1.0, math.inf, 0.0, 2.0], [-math.inf, 3.0, math.inf, 5.0]]
    absent = [[1.0, math.nan, 0.0, 2.0], [math.nan, 3.0, math.nan, 5.0]]
    assert rule(infinite, 3).tolist() == rule(absent, 3).tolist()
    assert rule(infinite, 3)[1].tolist() == [1, 3, -1]
