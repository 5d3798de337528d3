"""Which prompts of a window a round trains on: in which order, how often one is overtaken."""

import random
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.rollout_window import WindowRound, most_overtakes, places
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sampling

ANY = sys.maxsize


def group(number, overtaken=0):
    prompt = Prompt(str(number), "", (5,))
    return Group(str(number), prompt, Sampling(9), [Completion(0)], overtaken=overtaken)


def rounds(rule, number, lengths):
    """Draw rounds of prompts whose completions need so many steps; yield what each trains on."""
    pool, left, drawn = [], {}, 0
    for _ in range(number):
        for _ in range(rule.fresh_prompts(pool)):
            pool.append(group(drawn))
            left[pool[-1].id] = lengths(drawn)
            drawn += 1
        planned = list(rule.plan(pool))
        waiting = {g.id for g in rule.waiting(planned)}
        state = RoundState(planned, waiting=waiting)
        state.decoded = [g for g in planned if g.completions[0].finished]
        certain = []
        while not rule.done(state):
            running = [g for g in planned if not g.completions[0].finished]
            assert running, "it ends once all of them are there"
            state.final = len(state.decoded)
            certain.append([g.id for g in rule.final_groups(state)])
            for g in running:
                left[g.id] -= 1
                if left[g.id] <= 0:
                    g.completions[0].finish_reason = "stop"
                    state.decoded.append(g)
        before = [g.overtaken for g in planned]
        trained, pool = rule.split(planned, state)
        yield planned, before, trained, pool, certain
    assert {g.id for g in pool} <= {str(n) for n in range(drawn)}


@st.composite
def windows(draw):
    """Prompts of an update, prompts in flight, and by how many one may be overtaken."""
    update = draw(st.integers(1, 5))
    return update, draw(st.integers(update, 4 * update)), draw(st.sampled_from([0, 1, 2, 7, ANY]))


@given(windows(), st.integers(0, 9999), st.sampled_from([1, 3, 40]))
def test_whatever_the_lengths(window, seed, longest):
    """Some prompts decode for very long beside many short ones."""
    update, prompts, overtakes = window
    chance = random.Random(seed)
    rule = WindowRound(update, prompts, overtakes)
    seen, order = [], []
    lengths = [chance.choice([1, chance.randint(1, longest)]) for _ in range(30 * update + prompts)]
    for planned, before, trained, pool, certain in rounds(rule, 30, lengths.__getitem__):
        assert len(planned) == prompts and len(trained) == update
        assert before == sorted(before, reverse=True)
        names = [g.id for g in trained]
        for places_then in certain:
            assert set(places_then) <= set(names), "a place that is certain is never revoked"
        for one, more in pairwise(certain):
            assert more[: len(one)] == one, "and the order of the places stays"
        ready = {g.id for g in planned if g.completions[0].finished}
        oldest = [g.id for g in planned if g.id in ready]
        assert names == oldest[:update], "the oldest that are ready, however many are"
        seen += names
        order += map(int, names)
        assert not {g.id for g in pool} & {*seen}
        for g in pool:  # how many that were drawn later have been trained on
            assert g.overtaken == sum(other > int(g.id) for other in order)
            assert g.overtaken <= overtakes
    assert len(set(seen)) == len(seen) == 30 * update, "nothing is trained on twice"
    if overtakes == 0:
        assert order == sorted(order), "the data's order"
    left = {int(g.id) for g in pool}
    assert {*order} | left == set(range(30 * update + prompts - update)), "nothing is lost"


@given(windows(), st.integers(0, 9999))
def test_places_by_definition(window, seed):
    """The oldest have places, if those that they overtake once too often fit in too."""
    update, prompts, overtakes = window
    chance = random.Random(seed)
    overtaken = sorted((chance.randint(0, min(overtakes, 9)) for _ in range(prompts)), reverse=True)
    decoded = chance.sample(range(prompts), chance.choice([prompts, chance.randint(0, prompts)]))
    expected = []
    for number in sorted(decoded):
        taken = {*expected, number}
        due = {
            i
            for i in {*range(prompts)} - taken
            if overtaken[i] + sum(other > i for other in taken) > overtakes
        }
        if len(taken | due) <= update:
            expected.append(number)
    found = places(decoded, overtaken, update, overtakes)
    assert found == expected
    assert len(found) == update or len(decoded) < prompts


def test_places_by_hand():
    def of(decoded, most=2, overtakes=1, overtaken=(0,) * 5):
        return places(decoded, overtaken, most, overtakes)

    assert of([4, 3, 2, 1, 0]) == [0, 1], "the oldest, in whatever order they are decoded"
    assert of([4, 3, 2, 1]) == [1], "one overtakes the first, whose place is waited for"
    assert of([4, 3, 2, 1, 0], most=3) == [0, 1, 2]
    assert of([4, 3, 0]) == [0, 3] and of([4, 3], overtakes=2) == [3, 4]
    assert of([1, 0, 2], overtakes=0) == [0, 1] and of([0, 2], overtakes=0) == [0]
    assert of([2, 3, 4], overtakes=0) == []
    assert of([1, 2], overtaken=(1, 0, 0, 0, 0)) == [1], "the first may not be overtaken again"
    assert of([2, 3], overtaken=(9, 9, 0, 0, 0)) == [], "nor if more were allowed once"
    assert of([]) == []


def test_a_replacement_is_due_and_its_prompt_leaves():
    rule = WindowRound(2, 4, 0)
    planned = [group(i) for i in range(4)]
    assert [g.id for g in rule.waiting(planned)] == ["2", "3"]
    other = group("another")
    state = RoundState([*planned, other], waiting={"2", "3"})
    state.decoded = [planned[3], planned[1], planned[0]]
    assert not rule.done(state)
    state.decoded.append(other)
    state.final = 4
    assert rule.done(state) and rule.final_groups(state) == [planned[1], planned[0], other]
    trained, left = rule.split(state.planned, state)
    assert trained == [planned[0], planned[1], other] and left == planned[2:4]


def test_what_is_begun_can_be_reached():
    exact, any_order = WindowRound(4, 12, 0), WindowRound(4, 12, 8)
    assert [exact.reach(n) for n in (1, 2, 5)] == [4, 8, 20]
    assert [any_order.reach(n) for n in (1, 5)] == [12, 12], "the last round may still take it"
    assert (exact.ends_early, any_order.ends_early) == (False, True)
    assert not exact.off_policy and not any_order.off_policy
    assert WindowRound(4, 12, 1).reorders and not WindowRound(4, 4, 1).reorders
    assert exact.verifies_from == 1 and not any_order.waiting([group(i) for i in range(12)])
    assert exact.fresh_prompts([group(i) for i in range(12)]) == 0 and exact.ends_cycle([], [])
    assert exact.slot_prompts() == 4 and exact.most_prompts() == 12


def test_a_window_is_as_large_as_the_data():
    rule = WindowRound(4, 12, 0, fewer=True)
    rule.check_enough(9)
    assert rule.fresh_prompts([]) == 9
    with pytest.raises(UsageError, match=r"prompts_per_round=4"):
        rule.check_enough(3)
    with pytest.raises(UsageError, match=r"prompts_in_flight=12.*holds: 9"):
        WindowRound(4, 12, 0).check_enough(9)


@st.composite
def ages(draw):
    update, staleness = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return update, draw(st.integers(update, staleness * update)), staleness


@given(ages(), st.integers(0, 9999), st.sampled_from([1, 3, 40]))
def test_no_token_is_older_than_it_may_be(size, seed, longest):
    """If prompts wait instead of being verified."""
    update, prompts, staleness = size
    chance = random.Random(seed)
    overtakes = most_overtakes(staleness, update, prompts)
    rule = WindowRound(update, prompts, overtakes, staleness, None)
    lengths = [chance.choice([1, chance.randint(1, longest)]) for _ in range(30 * update + prompts)]
    begun = {}
    for number, (planned, _, trained, _, _) in enumerate(rounds(rule, 30, lengths.__getitem__)):
        for g in planned:
            begun.setdefault(g.id, number)
        for g in trained:
            # the first token may be as old as the update before the round that it was begun in
            assert 1 + number - begun[g.id] <= staleness


def test_the_bound_is_reached():
    """One prompt that never ends: it is waited for in the last round that it may be trained in."""
    assert most_overtakes(3, 2, 4) == 2
    rule = WindowRound(2, 4, 2, 3, None)
    ended, pool = [], [group(i) for i in range(4)]
    for number in range(3):
        pool += [group(10 * number + 20 + i) for i in range(rule.fresh_prompts(pool))]
        state = RoundState(pool, decoded=pool[1:])
        for g in pool[1:]:
            g.completions[0].finish_reason = "stop"
        ended.append(rule.done(state))
        if not ended[-1]:
            break
        _, pool = rule.split(pool, state)
    assert ended == [True, False], "after two have overtaken it"
    pool[0].completions[0].finish_reason = "length"
    state.decoded = pool
    assert rule.done(state)
    trained, _ = rule.split(pool, state)
    assert [g.id for g in trained] == ["0", "3"]


def test_sizes_by_hand():
    assert most_overtakes(2, 8, 16) == 0, "as many as may be: strictly first in, first out"
    assert most_overtakes(2, 8, 12) == 4
    assert most_overtakes(2, 8, 17) == most_overtakes(2, 8, 30) == 0
