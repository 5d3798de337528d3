from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.round_rule import FullRound, RoundState
from lit_rlsched.scheduling.sorted_batching import Mode, SortedRound
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def group(name, *reasons):
    completions = [
        Completion(i, [5] * (i + 1), [-1.0] * (i + 1), [(0, i + 1)], reason)
        for i, reason in enumerate(reasons)
    ]
    return Group(f"{name}@0", Prompt(name, name, (1,)), Sampling(8), completions)


A = group("a", "stop")
NOTHING = RoundState([])


def names(groups):
    return [(g.prompt.uid, [c.index for c in g.completions]) for g in groups]


def test_a_pool_is_loaded_whole_and_only_once_it_is_empty():
    rule = SortedRound(update_prompts=3, pool_prompts=12, num_generations=4)
    pool = [group(f"{i:02}", None) for i in range(12)]
    assert rule.fresh_prompts([]) == 12
    assert {rule.fresh_prompts(pool[:n]) for n in range(1, 13)} == {0}


@pytest.mark.parametrize(
    ("oversubscribe", "most"), [(None, 20), (1.0, 4), (1.5, 6), (2.1, 9), (3, 12), (9, 20)]
)
def test_the_prompts_that_decode(oversubscribe, most):
    rule = SortedRound(4, 20, 2, oversubscribe=oversubscribe)
    pool = [group(f"{i:02}", None, None) for i in range(20)]
    assert rule.most_prompts() == most
    assert names(rule.plan(pool)) == names(pool[:most])
    assert names(rule.plan(pool[:3])) == names(pool[:3])
    assert rule.ends_early == (most > 4)


def test_prompts_trained_on_in_part_make_room_for_others():
    rule = SortedRound(2, 20, 2, "completion", oversubscribe=1.5)
    pool = [group(f"{i:02}", None) for i in range(5)] + [group("05", None, None)] * 3
    assert len(rule.plan(pool)) == 6


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_a_group_rule_waits_for_groups(mode):
    rule = SortedRound(2, 8, 3, "group", mode)
    assert not rule.done(RoundState([A] * 8, decoded=[A] * 1, completions_decoded=20))
    assert rule.done(RoundState([A] * 8, decoded=[A] * 2, completions_decoded=6))
    assert rule.done(RoundState([A] * 8, decoded=[A] * 5, completions_decoded=15))


def test_a_completion_rule_counts_completions():
    rule = SortedRound(2, 8, 3, "completion")
    assert not rule.done(RoundState([A] * 8, decoded=[A] * 0, completions_decoded=5))
    assert not rule.done(RoundState([A] * 8, decoded=[A] * 8, completions_decoded=5))
    assert rule.done(RoundState([A] * 8, decoded=[A] * 0, completions_decoded=6))
    assert rule.done(RoundState([A] * 8, decoded=[A] * 0, completions_decoded=9))


def test_the_modes_differ_in_how_old_a_token_may_be():
    assert SortedRound(2, 8, 3).max_staleness == 0
    assert SortedRound(2, 8, 3, mode="on_policy", max_staleness=5).max_staleness == 0
    assert SortedRound(2, 8, 3, mode="partial").max_staleness is None
    assert SortedRound(2, 8, 3, mode="partial", max_staleness=2).max_staleness == 2
    assert FullRound(2).max_staleness == 0


def test_a_full_round_defers_and_awaits_nothing():
    rule = FullRound(3)
    assert rule.draws([A, A]) == [(None, 1)]
    assert not rule.is_long([A]) and not rule.awaits(NOTHING)
    assert rule.ends_cycle([A], []) and not rule.ends_cycle([A, A], [A])


def test_groups_are_settled_whole():
    a, b = group("a", "stop", None), group("b", "stop", "length")
    c, d = group("c", None, None), group("d", "stop", "stop")
    trained, left = SortedRound(2, 4, 2).split([a, b, c, d], NOTHING)
    assert names(trained) == [("b", [0, 1]), ("d", [0, 1])]
    assert names(left) == [("a", [0, 1]), ("c", [0, 1])]
    assert trained[0] is b and trained[1] is d


def test_completions_are_settled_one_by_one():
    a, b = group("a", "stop", None, "length"), group("b", "stop", "stop", "stop")
    c, d = group("c", None, None, None), group("d", None, "stop", None)
    trained, left = SortedRound(2, 4, 3, "completion").split([a, b, c, d], NOTHING)
    assert names(trained) == [("a", [0, 2]), ("b", [0, 1, 2]), ("d", [1])]
    assert names(left) == [("a", [1]), ("c", [0, 1, 2]), ("d", [0, 2])]
    assert trained[0].completions[1] is a.completions[2]
    assert names([a]) == [("a", [0, 1, 2])]


def test_more_than_an_update_may_be_ready():
    ready = [group(name, "stop", "stop") for name in "abcde"]
    for unit in ("group", "completion"):
        trained, left = SortedRound(2, 8, 2, unit).split(ready, NOTHING)
        assert trained == ready and left == []


reasons = st.lists(
    st.lists(st.sampled_from([None, "stop", "length"]), min_size=1, max_size=4), max_size=6
)


@given(reasons, st.sampled_from(["group", "completion"]), st.sampled_from(["on_policy", "partial"]))
def test_settling_is_a_partition_in_order(reasons, unit, mode):
    groups = [group(str(i), *row) for i, row in enumerate(reasons)]
    everything = [(g.id, c.index) for g in groups for c in g.completions]
    trained, left = SortedRound(2, 8, 4, unit, mode).split(groups, NOTHING)
    parts = [[(g.id, c.index) for g in part for c in g.completions] for part in (trained, left)]
    assert sorted(parts[0] + parts[1]) == everything
    assert all(part == sorted(part) for part in parts)
    assert all(g.completions for part in (trained, left) for g in part)
    assert all(c.finished for g in trained for c in g.completions)
    if unit == "group":
        assert {g.id for g in trained} | {g.id for g in left} == {g.id for g in groups}
        assert not {g.id for g in trained} & {g.id for g in left}
        assert all(any(not c.finished for c in g.completions) for g in left)
    else:
        assert not any(c.finished for g in left for c in g.completions)


def test_only_one_mode_is_off_policy():
    rules = {mode: SortedRound(2, 8, 3, mode=mode) for mode in get_args(Mode)}
    assert [mode for mode, rule in rules.items() if rule.off_policy] == ["partial"]


def test_a_full_round_keeps_nothing():
    rule, groups = FullRound(3), [group(name, "stop") for name in "abc"]
    rule.check_enough(3)
    assert [rule.fresh_prompts([A] * n) for n in (0, 2, 3, 5)] == [3, 1, 0, 0]
    assert rule.most_prompts() == 3 and rule.plan(groups * 2) == groups
    assert not rule.done(RoundState([A] * 3, decoded=[A] * 3, completions_decoded=3))
    assert rule.split(groups, NOTHING) == (groups, [])
