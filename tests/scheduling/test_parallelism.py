from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.rollpacker import TensorParallelPlanner

KINDS = ("short", "long")
sizes = st.integers(0, 4).map(lambda n: 2**n)
rounds = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 0, 0, 0, 0, 0, 1, 20, 21, 22, 100])),
    max_size=80,
)


@st.composite
def planners(draw: st.DrawFn) -> TensorParallelPlanner:
    minimum, size, maximum = sorted(draw(st.tuples(sizes, sizes, sizes)))
    return TensorParallelPlanner(size, maximum, minimum)


def play(planner: TensorParallelPlanner, kind: str, *preemptions: int) -> list[int]:
    """Sizes after each round."""
    seen = []
    for count in preemptions:
        planner.observe(kind, count)
        seen.append(planner.size(kind))
    return seen


# What the rule says, by hand.


def test_a_run_that_preempts_from_the_start_doubles():
    assert play(TensorParallelPlanner(1, 8), "short", 3) == [2]


def test_what_is_left_after_a_doubling_is_no_rise():
    planner = TensorParallelPlanner(1, 8)
    assert play(planner, "short", 100, 80, 80, 80, 84, 86) == [2, 2, 2, 2, 2, 2]
    # the average is 84: 88 is just within 1.05 of it
    assert play(planner, "short", 88, 95) == [2, 4]


def test_a_rise_right_after_a_change_waits_for_the_next():
    assert play(TensorParallelPlanner(1, 8), "short", 5, 5, 50) == [2, 2, 4]
    assert play(TensorParallelPlanner(1, 8), "short", 5, 50, 50, 50) == [2, 2, 2, 2]


def test_four_quiet_rounds_halve():
    planner = TensorParallelPlanner(4, 8)
    assert play(planner, "short", 0, 0, 0, 0) == [4, 4, 4, 2]
    assert play(planner, "short", 0, 0, 0, 0, 0) == [2, 2, 2, 1, 1]
    assert play(TensorParallelPlanner(4, 4), "short", 9, 0, 0, 0, 1, 0, 0, 0, 0) == [4] * 8 + [2]


def test_a_halving_that_was_right_counts_no_more():
    planner = TensorParallelPlanner(2, 2)
    assert play(planner, "long", *[0] * 10) == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert play(planner, "long", 7, 0, 0, 0, 0) == [2, 2, 2, 2, 1]


def test_a_halving_that_was_wrong_is_tried_half_as_often():
    planner, needed, changes = TensorParallelPlanner(2, 2), {1: 30, 2: 0}, []
    for number in range(200):
        before = planner.size("short")
        planner.observe("short", needed[before])
        if planner.size("short") < before:
            changes.append(number)
    gaps = [b - a for a, b in pairwise(changes)]
    # two rounds at size 1, a doubling after the second, then the quiet ones
    assert gaps == [10, 18, 34, 66]


def test_after_a_halving_the_average_starts_at_zero():
    """3 preemptions in the next round make it 1.5, and 2 are more than 1.05 times that."""
    sizes = play(TensorParallelPlanner(2, 2), "short", 0, 0, 0, 0, 3, 2)
    assert sizes == [2, 2, 2, 1, 1, 2] and all(type(size) is int for size in sizes)


def test_kinds_do_not_touch_each_other():
    planner = TensorParallelPlanner(2, 8)
    play(planner, "short", 5, 5, 5)
    play(planner, "long", 0, 0, 0, 0)
    assert (planner.size("short"), planner.size("long")) == (4, 1)


# What holds for whatever comes.


@given(planners(), rounds)
def test_sizes_are_powers_of_two_within_bounds_one_step_at_a_time(planner, observed):
    for kind, count in observed:
        before = {k: planner.size(k) for k in KINDS}
        planner.observe(kind, count)
        size = planner.size(kind)
        assert type(size) is int and size & (size - 1) == 0
        assert planner.minimum <= size <= planner.maximum
        assert size in (before[kind] // 2, before[kind], before[kind] * 2)
        assert all(planner.size(k) == before[k] for k in KINDS if k != kind)


@given(planners(), rounds)
def test_doubles_only_on_a_rise_halves_only_after_quiet_and_never_twice_in_a_row(planner, observed):
    past = {kind: [] for kind in KINDS}  # counts since the last change
    base = {kind: [0] for kind in KINDS}  # what a rise is one from, before them
    for kind, count in observed:
        before, seen = planner.size(kind), past[kind]
        changed_before = seen == [] and planner._kinds[kind].cooling
        planner.observe(kind, count)
        seen.append(count)
        if planner.size(kind) > before:
            assert count > 1.05 * min([*base[kind], *seen[:-1]])
            base[kind] = []
        if planner.size(kind) < before:
            assert len(seen) >= 4 and seen[-4:] == [0, 0, 0, 0]
            base[kind] = [0]
        if planner.size(kind) != before:
            assert not changed_before, "the round after a change changes nothing"
            past[kind] = []


@given(planners(), st.integers(1, 10**6))
def test_steady_preemptions_change_the_size_once_at_most(planner, count):
    assert len(set(play(planner, "short", *[count] * 40))) == 1


@given(planners(), rounds, rounds)
def test_a_state_goes_on_as_the_run_would(planner, before, after):
    for kind, count in before:
        planner.observe(kind, count)
    again = TensorParallelPlanner(planner.maximum, planner.maximum, planner.minimum)
    again.load_state_dict(planner.state_dict())
    for kind, count in after:
        planner.observe(kind, count)
        again.observe(kind, count)
        assert [again.size(k) for k in KINDS] == [planner.size(k) for k in KINDS]
    assert again.state_dict() == planner.state_dict()


def test_a_state_of_other_limits_is_brought_within_these():
    wide = TensorParallelPlanner(8, 8)
    narrow = TensorParallelPlanner(1, 2)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.size("short") == 2
