"""Dividing micro-batches among ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.routing import share

COSTS = st.lists(st.integers(1, 100), max_size=30)


@given(COSTS, st.integers(1, 9))
def test_every_item_counts_once_and_all_ranks_have_equally_many(costs, ranks):
    turns = share(costs, ranks)
    counted = [item for turn in turns for item, counts in turn if counts]
    assert sorted(counted) == list(range(len(costs)))
    assert all(len(turn) == ranks for turn in turns)
    assert len(turns) == -(-len(costs) // ranks)


@given(COSTS, st.integers(2, 9))
def test_no_rank_has_more_than_another_and_one_item(costs, ranks):
    totals = [0] * ranks
    for turn in share(costs, ranks):
        for rank, (item, counts) in enumerate(turn):
            totals[rank] += costs[item] * counts
    if costs:
        assert max(totals) - min(totals) <= max(costs)


@given(COSTS, st.integers(2, 9))
def test_items_of_a_turn_are_neighbours_in_cost(costs, ranks):
    turns = [[costs[item] for item, _ in turn] for turn in share(costs, ranks)]
    for turn, after in pairwise(turns):
        assert min(turn) >= max(after)


def test_one_rank_keeps_the_order():
    assert share([1, 5, 3], 1) == [[(0, True)], [(1, True)], [(2, True)]]


def test_by_hand():
    assert share([3, 2], 3) == [[(0, True), (1, True), (1, False)]]
    assert share([4, 1, 3, 2, 2], 2) == [
        [(0, True), (2, True)],  # 4, 3
        [(4, True), (3, True)],  # the second rank has less: it gets the first of the equal ones
        [(1, False), (1, True)],  # 6 against 5
    ]
