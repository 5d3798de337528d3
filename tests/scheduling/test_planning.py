import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lit_rlsched.scheduling import planning
from lit_rlsched.scheduling.planning import lower_bound, makespan, plan_makespan

whole = st.integers(0, 50)
fractions = st.floats(0, 1000)
jobs = st.lists(whole, max_size=60) | st.lists(fractions, max_size=60)
few_jobs = st.lists(whole, max_size=7) | st.lists(fractions, max_size=7)
epsilons = st.sampled_from([0.01, 0.05, 0.1, 0.3, 1])


@st.composite
def problems(draw, lengths=jobs, most_slots=8):
    """Lengths, slots, and what the slots are busy with or None."""
    slots = draw(st.integers(1, most_slots))
    loads = draw(st.none() | st.lists(whole | fractions, min_size=slots, max_size=slots))
    return draw(lengths), slots, loads


small = problems(few_jobs, most_slots=3)


def shortest(lengths, slots, loads):
    """The shortest makespan, by trying every plan."""
    best = math.inf
    for assignment in itertools.product(range(slots), repeat=len(lengths)):
        ends = list(loads or [0] * slots)
        for length, slot in zip(lengths, assignment, strict=True):
            ends[slot] += length
        best = min(best, max(ends))
    return best


def longest_first(lengths, slots, loads=None):
    """The longest job to the slot that is free first."""
    queues, ends = [[] for _ in range(slots)], [*(loads or [0] * slots)]
    for job in sorted(range(len(lengths)), key=lambda job: -lengths[job]):
        slot = ends.index(min(ends))
        queues[slot].append(job)
        ends[slot] += lengths[job]
    return queues


def unplannable(seed, n=12):
    """12 jobs over 3 slots that fit exactly, but not longest first."""
    cuts = random.Random(seed)
    thirds = []
    for _ in range(3):
        marks = sorted(cuts.sample(range(1, 1000), n // 3 - 1))
        thirds += [b - a for a, b in itertools.pairwise([0, *marks, 1000])]
    return thirds


@given(problems(), epsilons)
def test_every_job_is_in_one_queue(problem, epsilon):
    lengths, slots, loads = problem
    queues = plan_makespan(lengths, slots, epsilon, loads)
    assert len(queues) == slots
    assert sorted(i for queue in queues for i in queue) == list(range(len(lengths)))
    assert all(queue == sorted(queue, key=lambda i: (-lengths[i], i)) for queue in queues)


@given(problems(), epsilons)
def test_between_the_bound_and_longest_first(problem, epsilon):
    lengths, slots, loads = problem
    steps = makespan(plan_makespan(lengths, slots, epsilon, loads), lengths, loads)
    assert lower_bound(lengths, slots, loads) <= steps
    assert steps <= makespan(longest_first(lengths, slots, loads), lengths, loads)


@given(small, epsilons)
@example(([8, 7, 6, 5, 4], 2, None), 0.01)
@example(([5, 5, 4, 4, 3, 3, 3], 3, None), 0.01)
@example(([4, 4, 3, 3, 3], 2, [1, 0]), 0.01)
def test_within_epsilon_of_the_shortest(problem, epsilon):
    lengths, slots, loads = problem
    best = shortest(lengths, slots, loads)
    steps = makespan(plan_makespan(lengths, slots, epsilon, loads), lengths, loads)
    assert steps <= (1 + epsilon) * best * (1 + 1e-9)
    assert lower_bound(lengths, slots, loads) <= best * (1 + 1e-9 * isinstance(best, float))


def test_where_longest_first_is_at_its_worst():
    lengths = [3, 3, 2, 2, 2]
    assert longest_first(lengths, 2) == [[0, 2, 4], [1, 3]]
    assert makespan([[0, 2, 4], [1, 3]], lengths) == 7  # 4/3 - 1/6 times the shortest
    assert plan_makespan(lengths, 2, 0.01) == [[2, 3, 4], [0, 1]]


@pytest.mark.parametrize("seed", range(10))
def test_search_beats_swaps(seed):
    lengths = unplannable(seed)
    assert makespan(longest_first(lengths, 3), lengths) > 1000
    assert makespan(plan_makespan(lengths, 3, 1e-4), lengths) == 1000
    assert makespan(plan_makespan(lengths, 3, 1e-320), lengths) == 1000
    halves = [length / 2 for length in lengths]
    assert makespan(plan_makespan(halves, 3, 1e-4), halves) == 500


def test_a_search_finds_only_what_is_shorter():
    longest, busy = np.array([3, 3, 2, 2, 2]), np.zeros(2, int)
    assert planning._search(longest, busy, 6, 0.5, 10**6) is None
    found = planning._search(longest, busy, 7, 0.5, 10**6)
    assert np.bincount(found, longest).tolist() == [6, 6]


@pytest.mark.parametrize(("jobs", "work"), [(1, 502), (2, 1006)])
def test_the_work_of_a_search_adds_up(jobs, work):
    """500 a job, and the loads of new states: one state for the first job, two for the second."""
    for limit in (work, work - 1):
        found = planning._search(np.ones(jobs), np.zeros(2), 9.0, 1.0, limit)
        assert (found is not None) == (limit == work)


def test_what_a_search_may_do(monkeypatch):
    """All its work, or a sixteenth to improve what is good enough; grains are half of epsilon."""
    lengths, loads, seen = unplannable(0), [500, 0, 0], []
    monkeypatch.setattr(planning, "_search", lambda *args: seen.append(args[2:]))
    best = {makespan(plan_makespan(lengths, 3, e, loads), lengths, loads) for e in (0.5, 1e-4)}
    plan_makespan(lengths, 3, loads=loads)
    grain = lower_bound(lengths, 3, loads) / 2 / len(lengths)
    for (found, *limits), epsilon in zip(seen, (0.5, 1e-4, 0.1), strict=True):
        work = planning._MAX_CELLS if epsilon == 1e-4 else planning._MAX_CELLS / 16
        assert {found} == best and limits == [pytest.approx(epsilon * grain), work]


@pytest.mark.parametrize("slots", [2, 3, 4, 8])
def test_swaps_end_where_none_helps(slots):
    longest = np.sort(np.random.default_rng(slots).integers(1, 1000, 40))[::-1]
    idle = np.zeros(slots, int)
    home = planning._swap(longest, planning._list_schedule(longest, idle), idle, 0.0)
    ends = np.bincount(home, longest, slots)
    shift = longest[home == ends.argmax(), None] - longest
    assert (np.maximum(ends.max() - shift, ends[home] + shift) >= ends.max()).all()


@pytest.mark.parametrize(
    ("lengths", "loads", "before"), [([3, 3, 2, 2, 2], None, 7), ([3, 3, 2, 2], [2, 0], 7)]
)
def test_swaps_alone(monkeypatch, lengths, loads, before):
    monkeypatch.setattr(planning, "_MAX_CELLS", 1)
    assert makespan(longest_first(lengths, 2, loads), lengths, loads) == before
    assert makespan(plan_makespan(lengths, 2, 0.01, loads), lengths, loads) == 6


def test_merged_states_bound_the_work():
    longest, busy = np.arange(60, 20, -1.0) ** 2, np.zeros(3)
    assert planning._search(longest, busy, 1e9, 1.0, 100_000) is None
    assert planning._search(longest, busy, 1e9, 3000.0, 100_000) is not None


@given(small)
@example(([3, 3, 2, 2, 2], 2, None))
def test_without_time_to_search_as_good_as_longest_first(problem):
    lengths, slots, loads = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_MAX_CELLS", 1)
        patch.setattr(planning, "_MAX_PAIRS", 1)
        steps = makespan(plan_makespan(lengths, slots, 0.01, loads), lengths, loads)
    assert steps == makespan(longest_first(lengths, slots, loads), lengths, loads)
    worst = 4 / 3 - 1 / (3 * slots) if loads is None else 3 / 2 - 1 / (2 * slots)
    assert steps <= worst * shortest(lengths, slots, loads) * (1 + 1e-9)


def test_queues_follow_the_loads():
    assert plan_makespan([5, 4, 3], 3, loads=[4, 9, 0]) == [[1], [], [0, 2]]
    assert makespan([[1], [], [0, 2]], [5, 4, 3], [4, 9, 0]) == 9
    assert plan_makespan([1, 2], 2, loads=[0, 3]) == [[1, 0], []]


def test_lower_bound_by_hand():
    assert lower_bound([7, 1, 1], 2) == 7  # the longest
    assert lower_bound([3, 3, 3, 1, 1], 2) == 6  # two of the three share a slot, and 11 / 2
    assert lower_bound([5, 5, 5], 2) == 10  # two share a slot; the sum is 7.5 each
    assert lower_bound([4, 4, 4, 4, 4], 2) == 12  # three share a slot
    assert lower_bound([3, 2, 2, 2], 2) == 5  # 9 / 2, rounded up
    assert lower_bound([3.0, 2, 2, 2], 2) == pytest.approx(4.5)
    assert lower_bound([2, 2], 2, [5, 0]) == 5  # the fullest slot
    assert lower_bound([4, 4, 4], 3, [90, 6, 5]) == 90
    assert lower_bound([7, 1], 2, [4, 3]) == 10  # the longest after the smallest load
    assert lower_bound([5, 5, 5, 5], 3, [11, 0, 0]) == 11
    assert lower_bound([6, 6, 6, 6], 3, [11, 0, 0]) == 12  # the full slot does not help
    assert lower_bound([], 3) == 0
    assert isinstance(lower_bound([], 3), int)
    assert isinstance(lower_bound(np.array([3, 4]), 3, [1, 0, 0]), int)
    assert isinstance(lower_bound([3, 4], 3, [1.0, 0, 0]), float)
    assert lower_bound([2.0, 2], 2, [5.5, 0]) == 5.5


def test_a_bound_of_floats_is_never_above_their_sum():
    tenths = [0.1] * 100  # one by one they add up to less than 10
    assert lower_bound(tenths, 1) <= makespan([range(100)], tenths)


def test_corner_cases():
    assert plan_makespan([], 3) == [[], [], []]
    assert plan_makespan([2, 5, 5], 1) == [[1, 2, 0]]
    assert plan_makespan([2, 5], 4) == [[1], [0], [], []]
    assert sorted(map(len, plan_makespan([0, 0, 0, 0], 2))) == [0, 4]
    assert plan_makespan([3.0], 2, math.inf) == [[0], []]
    assert plan_makespan(np.array([1, 2], np.int32), 2) == [[1], [0]]
    assert makespan([], []) == 0
