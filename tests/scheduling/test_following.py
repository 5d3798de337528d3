"""What is known of the rounds after one that has not begun: their prompts and their order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tail_groups import fresh, names, ready

from lit_rlsched.scheduling.in_flight_updates import WindowedRound
from lit_rlsched.scheduling.round_rule import FullRound, RoundState
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.types import Prompt

SHARES = {"x": 0.5, "y": 0.5}
ratios = st.sampled_from([1.0, 1.25, 1.5, 2.0])


def drawn(draws, mark="n"):
    """Groups that were drawn from the data; they are scored, which nobody asks before the end."""
    groups, domains = [], [domain for domain, n in draws for _ in range(n)]
    for i, domain in enumerate(domains):
        prompt = Prompt(f"{mark}{i:02}", "?", (1,), {"domain": domain})
        groups += [replace(one, prompt=prompt) for one in ready([prompt.uid])]
    return groups


def besides(pool, planned):
    taken = {one.id for one in planned}
    return [one for one in pool if one.id not in taken]


def left_by(rule, planned, random):
    """What a round leaves whose prompts are decoded in any order."""
    decoded = random.sample(planned, len(planned))
    return rule.settle(planned, RoundState(planned, 2 * len(planned), decoded))[1]


@given(st.integers(1, 4), st.integers(0, 9))
def test_after_a_round_that_leaves_nothing_comes_what_was_planned(update, n):
    for rule in (FullRound(update), TailRound(update, 2, 1.0), WindowedRound(update, update, 1, 1)):
        pool = fresh(n)
        pool += drawn(rule.draws(pool))
        planned = rule.plan(pool)
        assert not rule.may_leave(planned)
        rest = besides(pool, planned)
        rest += drawn(rule.draws_following(planned, rest), "m")
        following = rule.plan_following(planned, rest)
        assert names(following) == names(rule.plan(rest))
        assert len(following) == update and rule.fresh_prompts(rest) == 0


@pytest.mark.parametrize("rule", [WindowedRound(2, 4, 3, 1), SortedRound(2, 4, 2)])
def test_nothing_is_drawn_for_the_rounds_after_one_that_may_leave_groups(rule):
    """Where these need the places of the others."""
    pool = fresh(4)
    assert rule.may_leave(pool) and rule.draws_following(pool, []) == []
    assert rule.plan_following(pool, []) == []


def test_after_the_last_round_of_a_pool_comes_the_next_pool():
    rule = SortedRound(2, 4, 2)
    assert rule.draws_following(fresh(2), []) == [(None, 4)]
    assert rule.draws_following(fresh(2), fresh(6)[2:]) == [(None, 0)]
    assert names(rule.plan_following(fresh(2), fresh(6)[2:])) == names(fresh(6)[2:])


@given(st.integers(1, 4), ratios, st.integers(0, 9), st.integers(0, 9), st.randoms())
def test_losers_come_in_the_next_round_if_that_will_be_long_and_then_a_race(
    update, ratio, losers, n, random
):
    rule = TailRound(update, 2, ratio)
    pool = [replace(one, deferred=1) for one in drawn([(None, losers)], "l")]
    pool += drawn([(None, n)], "f")
    planned = list(rule.plan(pool))
    rest = besides(pool, planned)
    new = drawn(rule.draws_following(planned, rest))
    following = rule.plan_following(planned, [*rest, *new])
    race = [one for one in [*rest, *new] if not one.deferred][: rule.most_prompts()]
    assert len(race) == rule.most_prompts()
    # the round ends, and those that it leaves keep their places in the pool
    left = {one.id: one for one in left_by(rule, planned, random)}
    stay = {one.id for one in rest} | left.keys()
    pool = [left.get(one.id, one) for one in pool if one.id in stay]
    then = rule.plan([*pool, *new])
    if rule.is_long(then):
        assert names(following) == names([*(g for g in then if g.id not in left), *race])
    else:
        assert names(following) == names(then) == names(race)


@given(
    st.sampled_from([2, 4, 6]),
    ratios,
    st.integers(0, 4),
    st.sampled_from([None, SHARES]),
    st.randoms(),
)
def test_fresh_prompts_have_a_place_beside_the_losers_of_a_round(update, ratio, n, shares, random):
    rule = DeferringTailRound(update, 2, ratio, shares=shares, max_deferrals=3)
    planned = list(rule.plan(drawn(rule.draws([]), "f")))
    rest = drawn([(random.choice([*rule.quotas]), 1) for _ in range(n)], "r")
    draws = rule.draws_following(planned, rest)
    losers = left_by(rule, planned, random)
    assert draws == rule.draws([*losers, *rest])
    rest += drawn(draws)
    following = rule.plan_following(planned, rest)
    assert names(following) == names(rule.plan(rest))
    if len(rest) == update:  # none waited that has no place
        then = rule.plan([*losers, *rest])
        assert {one.id for one in then} == {one.id for one in [*losers, *following]}
