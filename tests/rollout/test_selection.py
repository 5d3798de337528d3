from collections import Counter
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlsched.callbacks import DynamicSampling
from lit_rlsched.scheduling.down_sampling import RULES, informative
from lit_rlsched.training.round import Round
from lit_rlsched.training.selection import (
    Selection,
    Stop,
    count_drops,
)
from lit_rlsched.types import Completion, Group, Prompt, Sampling

scores = st.none() | st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-3, 3)


def group(name, rewards, dropped=()):
    """Of completions with these rewards; those without a place were aborted."""
    completions = [
        Completion(i, [7], [-1.0], finish_reason="stop", scores=[rewards[i]])
        for i in sorted(rewards)
    ]
    for completion in completions:
        if completion.index in dropped:
            completion.dropped, completion.scores = "nonfinite_logprob", [None]
    return Group(name, Prompt(name, name, (1,)), Sampling(8), completions)


@st.composite
def rounds(draw):
    """Ragged groups of up to eight, of which some completions are dropped already."""
    groups = []
    for name in range(draw(st.integers(1, 5))):
        places = draw(st.sets(st.integers(0, 7), min_size=1))
        rewards = {i: draw(scores) for i in places}
        groups.append(group(str(name), rewards, draw(st.sets(st.sampled_from(sorted(places))))))
    return groups


def kept(group):
    return [c for c in group.completions if c.dropped is None]


@settings(max_examples=2 * settings.default.max_examples)
@given(
    rounds(),
    st.integers(2, 8),
    st.sampled_from([*RULES]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**62),
)
def test_as_many_as_can_be_and_each_other_one_has_a_reason(
    groups, keep, rule, full, drop_uninformative, by_group, seed
):
    before = Counter(c.dropped for g in groups for c in g.completions if c.dropped)
    round = Round(0, 0, groups)
    Selection(keep, rule, full, drop_uninformative).select(round, [1.0], by_group, seed)
    for g in groups:
        scored = [c for c in g.completions if c.scores != [None]]
        others = {c.dropped for c in g.completions if c.scores == [None]}
        assert others <= {"unscored", "nonfinite_logprob"}
        reasons = {c.dropped for c in scored}
        if by_group and len(scored) < 2:
            assert reasons <= {"too_few_scores"}
        elif "uninformative" in reasons:
            assert reasons == {"uninformative"} and by_group and drop_uninformative
            if rule == "max_variance":
                assert not informative([c.scores[0] for c in scored])
        else:
            assert len(kept(g)) == min(keep, len(scored))
            assert reasons <= {None, "down_sampled"}
            if by_group and drop_uninformative:
                assert informative([c.scores[0] for c in kept(g)]) or full
    total = sum(len(g.completions) for g in groups)
    dropped = count_drops(round)
    assert sum(len(kept(g)) for g in groups) + dropped.total() + before.total() == total


@given(rounds(), st.integers(2, 6), st.integers(0, 2**62))
def test_random_depends_on_the_seed_alone(groups, keep, seed):
    choices = []
    for seeds in (seed, seed, seed + 1):
        copies = [g.copy() for g in groups]
        Selection(keep, "random", drop_uninformative=False).select(
            Round(0, 0, copies), [1.0], True, seeds
        )
        choices.append([[c.index for c in kept(g)] for g in copies])
    assert choices[0] == choices[1]
    assert [len(c) for c in choices[0]] == [len(c) for c in choices[2]]


@given(rounds(), st.integers(2, 6), st.sampled_from([*RULES]), st.integers(0, 99), st.data())
def test_what_is_kept_of_a_group_follows_from_that_group_alone(groups, keep, rule, seed, data):
    """So processes that hold different groups need not exchange any."""
    whole, copies = [[g.copy() for g in groups] for _ in range(2)]
    Selection(keep, rule).select(Round(0, 0, whole), [1.0], True, seed)
    rank_of = [data.draw(st.integers(0, 2)) for _ in copies]
    for rank in sorted({*rank_of}):
        part = [g for g, r in zip(copies, rank_of, strict=True) if r == rank]
        Selection(keep, rule).select(Round(0, 0, part), [1.0], True, seed)
    assert [[c.dropped for c in g.completions] for g in copies] == [
        [c.dropped for c in g.completions] for g in whole
    ]


@given(rounds(), st.integers(2, 6), st.sampled_from([*RULES]), st.data())
def test_what_is_masked_is_chosen_as_little_as_what_has_no_score(groups, keep, rule, data):
    unscored = [g.copy() for g in groups]
    for g, other in zip(groups, unscored, strict=True):
        for cut, same in zip(g.completions, other.completions, strict=True):
            if data.draw(st.booleans()):
                cut.finish_reason, same.scores = "length", [None]
    for of in (groups, unscored):
        Selection(keep, rule, mask_truncated=True).select(Round(0, 0, of), [1.0], True, 0)
    chosen, others = ([[c.index for c in kept(g)] for g in of] for of in (groups, unscored))
    assert chosen == others


def test_a_group_does_not_stop_for_what_is_masked():
    stop = Stop(Selection(2, reward_range=(0.0, 1.0), mask_truncated=True), [1.0])
    mixed = group("a", {0: 0.0, 1: 1.0})
    assert stop.waits(mixed) and stop.stops(mixed)
    mixed.completions[0].finish_reason = "length"
    assert not stop.waits(mixed) and not stop.stops(mixed)


def test_random_varies_with_the_seed():
    sets = set()
    for seed in range(20):
        g = group("a", {i: float(i) for i in range(8)})
        Selection(3, "random").select(Round(0, 0, [g]), [1.0], True, seed)
        sets.add(tuple(c.index for c in kept(g)))
    assert len(sets) > 10


def test_whose_rewards_are_compared_with_the_full_group_teach_by_that():
    """The two best of a mixed group have an advantage over the others, if not over each other."""
    mixed, equal = group("a", dict(enumerate([1.0, 0.0, 1.0, 0.0]))), group("b", {0: 1.0, 1: 1.0})
    Selection(2, "max_reward", full_scope=True).select(Round(0, 0, [mixed, equal]), [1.0], True, 0)
    assert [c.index for c in kept(mixed)] == [0, 2]
    assert not kept(equal)
    mixed = group("a", dict(enumerate([1.0, 0.0, 1.0, 0.0])))
    Selection(2, "max_reward").select(Round(0, 0, [mixed]), [1.0], True, 0)
    assert {c.dropped for c in mixed.completions} == {"uninformative"}


# When a group stops.


def stop(keep, low=0.0, high=1.0, weights=(1.0,)):
    return Stop(Selection(keep, reward_range=(low, high)), weights)


@pytest.mark.parametrize(
    ("keep", "rewards", "stops"),
    [
        (4, [0, 0, 1, 1], True),
        (4, [0, 1, 1, 1], False),
        (4, [0, 1, 1, 1, 0.5, 0], True),
        (4, [0, 1, 1, 1, 0.5, 0.001], False),
        (3, [0, 1, 1], True),
        (3, [0, 0, 1], True),
        (3, [1, 1, 1], False),
        (2, [0, 1, None], True),
        (2, [0, None], False),
        (2, [None, None], False),
        (2, [0, 1, 2], False),  # outside: nobody knows how far rewards go
        (2, [-1, 0, 1], False),
    ],
)
def test_when_a_group_needs_no_more(keep, rewards, stops):
    some = group("a", dict(enumerate(rewards)))
    some.completions.append(Completion(len(rewards)))
    assert stop(keep).waits(some) == (len(rewards) >= keep)
    assert stop(keep).stops(some) == stops


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=6), st.integers(2, 4))
def test_no_more_completions_could_give_a_larger_variance(rewards, keep):
    def largest(rewards):
        return max((np.var(some) for some in combinations(rewards, keep)), default=-1.0)

    wanted = largest(rewards) >= largest([*rewards, 0.0, 0.0, 1.0, 1.0]) - 1e-12
    assert stop(keep).stops(group("a", dict(enumerate(rewards)))) == wanted


@pytest.mark.parametrize("weights", [(1.1, 2.2), (0.7, 0.2, 0.1), (0.1, 0.7, 0.2)])
def test_rounding_of_weighted_rewards_does_not_keep_a_group_from_stopping(weights):
    """1.1 + 2.2 is a little more than 3.3."""
    low, high = [0.0] * len(weights), [1.0] * len(weights)
    some = group("a", {0: 0.0, 1: 0.0})
    some.completions[0].scores, some.completions[1].scores = low, high
    assert stop(2, 0.0, round(sum(weights), 6), weights).stops(some)


def test_a_group_from_which_nothing_can_be_learned_is_dropped():
    equal, differs = group("a", {0: 1.0, 1: 1.0}), group("a", {0: 1.0, 1: 0.0})
    replaces = partial(DynamicSampling().replaces, due=1, prompts=1, weights=[1.0])
    assert replaces(equal)
    assert [c.dropped for c in equal.completions] == ["uninformative"] * 2
    assert not replaces(differs)
    assert kept(differs) == differs.completions
    last = group("c", {0: 0.0, 1: None})
    assert replaces(last)
    assert [c.dropped for c in last.completions] == ["too_few_scores", "unscored"]
