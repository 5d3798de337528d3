"""Tail batching with a limit of deferrals: losers go on beside fresh prompts."""

import pytest
from tail_groups import fresh, group, lost, names, ready

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.tail_batching import DeferringTailRound
from lit_rlsched.settings import UsageError


def test_with_a_limit_of_deferrals_losers_race_again():
    rule = DeferringTailRound(3, 2, 1.5, max_deferrals=3)
    pool = [*lost(2), *fresh(3)]  # one has lost once, the other twice
    assert names(rule.plan(pool)) == "l00l01f00f01f02"
    assert rule.fresh_prompts(pool) == 0 and rule.fresh_prompts(lost(2)) == 3
    assert rule.most_deferred == 0 and rule.ends_cycle(pool, lost(2))
    assert not rule.is_long(lost(2)) and rule.is_long(lost(3))
    rule.check_enough(5)
    with pytest.raises(UsageError, match="has 5 prompts in a race, and `train_data` holds 4"):
        rule.check_enough(4)


def test_all_that_lost_has_a_place_where_one_has_lost_too_often():
    rule = DeferringTailRound(3, 2, 2.0, max_deferrals=2)
    late, again = ready(["late"], deferred=2) + ready(["again"], deferred=1)
    first, second = ready("ab")
    planned = [late, again, first, second, *fresh(2)]
    state = RoundState(planned, 12, [first, second], 4, patient=True, final=2)
    assert not rule.done(state) and rule.final_groups(state) == [first]
    state.decoded.append(late)
    assert not rule.done(state)
    state.decoded.append(again)
    state.final = 4
    assert rule.done(state) and rule.final_groups(state) == [first, late, again]
    trained, left = rule.settle(planned, state)
    assert names(trained) == "lateagaina"
    assert [(g.prompt.uid, g.deferred) for g in left] == [("b", 1), ("f00", 1), ("f01", 1)]
    late.deferred = 1  # none too often: a race like any other
    state = RoundState(planned, 12, [first, second, late], 6, patient=True, final=3)
    assert rule.done(state) and rule.final_groups(state) == [first, second, late]


@pytest.mark.parametrize("completion_ratio", [1.0, 2.0])
def test_a_race_waits_for_no_scores_that_change_nothing(completion_ratio):
    """Of prompts that go on there are no more completions than are trained on."""
    rule = DeferringTailRound(2, 2, 2.0, completion_ratio, max_deferrals=8)
    went_on, fast = group("on", None, None, deferred=1), group("a", None, None, None, None)
    finished = {went_on.id: went_on.completions}
    state = RoundState([went_on, fast], 6, [went_on], 2, finished, patient=True)
    assert not rule.awaits(state)
    finished[fast.id] = fast.completions[:2]
    assert rule.awaits(state) == (completion_ratio > 1)
    for c in fast.completions[:2]:
        c.scores = [1.0]
    assert not rule.awaits(state)
    fast.completions = fast.completions[:2]  # it had enough
    fast.completions[0].dropped = "uninformative"
    finished[fast.id] = group("a", 1.0, 1.0, None, None).completions
    assert not rule.awaits(state)


def test_a_place_that_nothing_can_be_trained_on_is_free_again():
    rule = DeferringTailRound(2, 2, 2.0, max_deferrals=1)
    (late,) = ready(["late"], deferred=1, dropped=(0, 1))
    decoded = [late, *ready("ab")]
    state = RoundState([late, *decoded[1:]], 6, decoded, 6, patient=True, final=3)
    assert rule.done(state) and names(rule.final_groups(state)) == "ab"
