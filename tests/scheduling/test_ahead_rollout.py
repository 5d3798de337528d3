"""In which parts the drafts of a round are verified."""

from hypothesis import example, given
from hypothesis import strategies as st

from lit_rlsched.scheduling.ahead_rollout import (
    draft_positions,
    has_drafts,
    turns_beside,
    verified_together,
)
from lit_rlsched.types import Completion, Draft, Group, Prompt, Sampling


def group(name, lengths):
    """One with a prompt of two tokens and drafts of these lengths; 0: none."""
    drafts = [Draft([7] * n, [0.0] * n, [(0, n)]) if n else None for n in lengths]
    completions = [Completion(i, draft=draft) for i, draft in enumerate(drafts)]
    return Group(name, Prompt(name, "", (2, 3)), Sampling(16), completions)


def test_the_engine_makes_its_share_of_the_steps_that_the_next_round_needs():
    groups = [group("a", [40, 0, 20]), group("b", [39])]  # prompts do not count
    for slots, steps in ((1, 99), (2, 49), (10, 40), (999, 40)):  # 40: those of the longest draft
        assert turns_beside(groups, groups, 1.0, slots) == steps
    assert turns_beside(groups, groups, 0.25, 10) == 10
    assert turns_beside(groups[:1], groups, 1.0, 10) == 40 * 60 // 99
    assert turns_beside([], groups, 1.0, 1) == 0 == turns_beside([], [], 1.0, 1)


@example([[0, 1], [0]])
@example([[], [1]])
@given(st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=30))
def test_the_longest_drafts_are_verified_first_in_parts_of_about_equal_positions(lengths):
    groups = [group(str(i), of_group) for i, of_group in enumerate(lengths)]
    parts = verified_together(groups)
    assert sorted(g.id for part in parts for g in part) == sorted(g.id for g in groups)
    order = [lengths[int(g.id)] for part in parts for g in part]
    longest = [max(drafts, default=0) if all(drafts) else 99 for drafts in order]
    assert longest == sorted(longest, reverse=True)
    total, most = draft_positions(groups), max(draft_positions([g]) for g in groups)
    assert all(draft_positions(part) <= total / 4 + most for part in parts)
    assert len(parts) <= 4
    if most and 2 * 4 * most <= total:
        assert len(parts) == 4


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6))
def test_a_draft_is_computed_with_its_prompt(lengths):
    groups = [group(str(i), of_group) for i, of_group in enumerate(lengths)]
    drafts = [n for of_group in lengths for n in of_group if n]
    assert draft_positions(groups) == sum(2 + n for n in drafts)
    assert has_drafts(groups) == bool(drafts)


def test_parts_by_hand():
    """Each begins with the group whose positions reach the next quarter of all."""
    groups = [group(str(i), [n]) for i, n in enumerate([2, 6, 0, 2, 2, 4, 0])]
    parts = [[g.id for g in part] for part in verified_together(groups)]
    assert parts == [["2", "6", "1"], ["5"], ["0", "3"], ["4"]]
    equal = verified_together([group(str(i), [1]) for i in range(5)])
    assert [[g.id for g in part] for part in equal] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert verified_together(groups[2:3] * 3) == [groups[2:3] * 3]
    assert verified_together([]) == []
