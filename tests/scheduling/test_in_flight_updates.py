"""How old a token may get when prompts go on from round to round, and prompts that overtake."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.in_flight_updates import (
    InFlight,
    WindowedRound,
    capacity,
    taken,
    window_of,
)
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def group(number, overtaken=0):
    prompt = Prompt(str(number), "", (5,))
    return Group(str(number), prompt, Sampling(9), [Completion(0)], overtaken=overtaken)


@st.composite
def sizes(draw):
    update, staleness = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return update, draw(st.integers(update, staleness * update)), staleness


@given(sizes(), st.integers(0, 9999), st.sampled_from([1, 3, 40]))
def test_no_token_is_older_than_it_may_be(size, seed, longest):
    """Whatever the lengths: some prompts decode for very long beside many short ones."""
    update, prompts, staleness = size
    chance = random.Random(seed)
    rule = WindowedRound(update, prompts, staleness, steps_per_round=3)
    assert rule.max_staleness == 3 * staleness
    pool, left, begun, most_overtaken = [], {}, {}, 0
    for number in range(30):
        for _ in range(rule.fresh_prompts(pool)):
            pool.append(group(len(left)))
            left[pool[-1].id] = chance.choice([1, chance.randint(1, longest)])
        assert len(left) <= capacity(staleness, update, updates=number)
        planned = list(rule.plan(pool))
        assert len(planned) == prompts
        state = RoundState(planned, len(planned))
        for g in planned:
            begun.setdefault(g.id, number)
        state.decoded = [g for g in planned if g.completions[0].finished]
        while not rule.done(state):
            running = [g for g in planned if not g.completions[0].finished]
            assert running, "it ends once all of them are there"
            for g in running:
                left[g.id] -= 1
                if left[g.id] <= 0:
                    g.completions[0].finish_reason = "stop"
                    state.decoded.append(g)
        trained, pool = rule.settle(planned, state)
        assert len(trained) == update
        for g in trained:
            # the first token may be as old as the update before the round that it was begun in
            assert 1 + number - begun[g.id] <= staleness
        most_overtaken = max([most_overtaken, *(g.overtaken for g in pool)])
    assert most_overtaken < rule.window


def test_the_bound_is_reached():
    """One prompt that never ends: it is waited for in the last round that it may be trained in."""
    rule, ended = WindowedRound(2, 4, 3, 1), []
    assert rule.window == 3
    pool = [group(i) for i in range(4)]
    for number in range(3):
        pool += [group(10 * number + 20 + i) for i in range(rule.fresh_prompts(pool))]
        state = RoundState(pool, 4, decoded=pool[1:])
        for g in pool[1:]:
            g.completions[0].finish_reason = "stop"
        ended.append(rule.done(state))
        if not ended[-1]:
            break
        _, pool = rule.settle(pool, state)
    assert ended == [True, False], "after two have overtaken it"
    pool[0].completions[0].finish_reason = "length"
    state.decoded = pool
    assert rule.done(state)
    trained, _ = rule.settle(pool, state)
    assert [g.id for g in trained] == ["0", "3"]


def test_nothing_is_waited_for_if_what_is_too_old_is_verified():
    """The prompt that never ends goes on beside the others."""
    rule = WindowedRound(2, 5, 2, steps_per_round=3, too_old="verify")
    assert (rule.verifies_from, rule.max_staleness) == (4, 6)
    assert WindowedRound(2, 5, 1, 3, "verify").verifies_from == 1
    assert WindowedRound(2, 4, 2, 3).verifies_from is None
    usual = [(how, n) for how in ("wait", "verify") for n in (1, 3)]
    assert [WindowedRound(4, None, n, 1, how).prompts for how, n in usual] == [4, 10, 6, 10]
    pool = [group(i) for i in range(5)]
    for number in range(50):
        pool += [group(10 * number + 20 + i) for i in range(rule.fresh_prompts(pool))]
        for g in pool[1:]:
            g.completions[0].finish_reason = "stop"
        state = RoundState(pool, 5, decoded=pool[1:])
        assert rule.done(state) and not rule.done(RoundState(pool, 5, decoded=pool[1:2]))
        trained, pool = rule.settle(pool, state)
        assert len(trained) == 2 and pool[0].id == "0"
    assert pool[0].overtaken == 100


def test_prompts_that_are_taken_by_hand():
    def of(ready, most=9, window=3, overtaken=None):
        return taken(overtaken or [0] * len(ready), [r == "x" for r in ready], most, window)

    assert of("xxxx") == [0, 1, 2, 3], "nobody is overtaken"
    assert of("xxxx", most=3) == [0, 1, 2]
    assert of(".xxx") == [1, 2], "the first is overtaken by two, the most"
    assert of(".x.xx") == [1, 3]
    assert of("x.xxxx") == [0, 2, 3]
    assert of(".xxx", window=1) == []
    assert of(".xxx", overtaken=[1, 0, 0, 0]) == [1]
    assert of("x.xx", overtaken=[0, 2, 0, 0]) == [0]
    assert of(".x.x", overtaken=[0, 0, 2, 0]) == [1]
    assert of("...") == of("") == []


def test_sizes_by_hand():
    assert capacity(2, 8, updates=0) == 16
    assert capacity(2, 8, updates=3) == 40
    assert window_of(2, 8, 16) == 1, "as many as may be: strictly first in, first out"
    assert window_of(2, 8, 12) == 5
    assert window_of(2, 8, 17) == window_of(2, 8, 30) == 0
    rule = WindowedRound(8, 12, 2, 4)
    assert (rule.most_prompts(), rule.ends_early, rule.off_policy) == (12, True, True)
    assert rule.fresh_prompts([group(0)] * 5) == 7 and rule.fresh_prompts([group(0)] * 13) == 0
    assert len(rule.plan([group(0)] * 13)) == 12
    assert not WindowedRound(8, 8, 1, 4).ends_early
    assert not rule.final_groups(RoundState([], 0))
    assert [WindowedRound(n, None, 2, 1).prompts for n in (1, 2, 3)] == [2, 3, 5]


@pytest.mark.parametrize(
    "settings", [{"turns": 1}, {"too_old": "verify"}, {"cache": "keep"}, {"replay": None}]
)
def test_settings_at_their_bounds(settings):
    InFlight(**settings)


@pytest.mark.parametrize("prompts", [7, 17])
def test_wrong_sizes_are_refused(prompts):
    with pytest.raises(UsageError, match=rf"prompts_in_flight={prompts}, .*use 8 to 16, or a larg"):
        WindowedRound(8, prompts, 2, 1)
    told = (
        r"^`InFlightUpdates\(max_staleness=-1\)`: must be .* 1 or more\. 0 is a run without .*k\.$"
    )
    with pytest.raises(UsageError, match=told):
        WindowedRound(8, 8, -1, 1)
    with pytest.raises(
        ValueError, match=r"decodes 12 prompts .* `train_data` holds 11\. Use a low"
    ):
        WindowedRound(8, 12, 2, 1).check_enough(11)
    WindowedRound(8, 12, 2, 1).check_enough(12)
    WindowedRound(8, 17, 2, 1, "verify")
    with pytest.raises(UsageError, match=r"prompts_in_flight=7, .*use 8 or more\."):
        WindowedRound(8, 7, 2, 1, "verify")
