import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lit_rlsched.benchmark.bubbles import bubble_ratio, decode, draw_lengths
from lit_rlsched.scheduling import planning
from lit_rlsched.scheduling.planning import (
    longest_first,
    lower_bound,
    makespan,
    plan_makespan,
    pool_bubble_ratio,
    recommend_slots,
)
from lit_rlsched.scheduling.rounds import SortedRound

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
    for queues in (
        plan_makespan(lengths, slots, epsilon, loads),
        longest_first(lengths, slots, loads),
    ):
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


@pytest.mark.parametrize("seed", range(5))
def test_nine_jobs_within_a_hundredth(seed):
    lengths = [int(1 + x) for x in np.random.default_rng(seed).lognormal(4, 1, 9)]
    for slots, loads in ((3, None), (3, [100, 0, 40]), (2, None)):
        steps = makespan(plan_makespan(lengths, slots, 0.01, loads), lengths, loads)
        assert steps <= 1.01 * shortest(lengths, slots, loads)


@given(problems(st.lists(whole, max_size=40)), st.randoms())
def test_order_of_the_jobs_does_not_matter(problem, rng):
    lengths, slots, loads = problem
    shuffled = rng.sample(lengths, len(lengths))
    assert makespan(plan_makespan(lengths, slots, loads=loads), lengths, loads) == makespan(
        plan_makespan(shuffled, slots, loads=loads), shuffled, loads
    )


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
    halves = [length / 2 for length in lengths]
    assert makespan(plan_makespan(halves, 3, 1e-4), halves) == 500


@pytest.mark.parametrize(
    ("lengths", "loads", "before"), [([3, 3, 2, 2, 2], None, 7), ([3, 3, 2, 2], [2, 0], 7)]
)
def test_swaps_alone(monkeypatch, lengths, loads, before):
    monkeypatch.setattr(planning, "_MAX_CELLS", 1)
    assert makespan(longest_first(lengths, 2, loads), lengths, loads) == before
    assert makespan(plan_makespan(lengths, 2, 0.01, loads), lengths, loads) == 6


@given(small, st.sampled_from([0.5, 2, 10]))
def test_search_loses_a_grain_a_job(problem, grain):
    lengths, slots, loads = problem
    longest = np.array(sorted(lengths, reverse=True), float)
    busy = np.array(loads or [0] * slots, float)
    found = planning._search(longest, busy, math.inf, grain, 10**6)
    np.add.at(busy, found, longest)
    assert busy.max() <= shortest(lengths, slots, loads) + len(lengths) * grain + 1e-6


def test_merged_states_bound_the_work():
    longest, busy = np.arange(60, 20, -1.0) ** 2, np.zeros(3)
    assert planning._search(longest, busy, 1e9, 1.0, 100_000) is None
    assert planning._search(longest, busy, 1e9, 3000.0, 100_000) is not None


def test_grain_adds_up_to_half_of_epsilon(monkeypatch):
    grains = []
    monkeypatch.setattr(
        planning, "_search", lambda jobs, busy, best, grain, cells: grains.append(grain)
    )
    lengths = unplannable(0)
    plan_makespan(lengths, 3, 0.2)
    assert grains == [pytest.approx(0.2 / 2 * 1000 / 12)]


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
    assert longest_first([5, 4, 3], 3, [4, 9, 0]) == [[1], [], [0, 2]]
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


def test_corner_cases():
    assert plan_makespan([], 3) == [[], [], []]
    assert plan_makespan([2, 5, 5], 1) == [[1, 2, 0]]
    assert plan_makespan([2, 5], 4) == [[1], [0], [], []]
    assert sorted(map(len, plan_makespan([0, 0, 0, 0], 2))) == [0, 4]
    assert plan_makespan([3.0], 2, math.inf) == [[0], []]
    assert plan_makespan(np.array([1, 2], np.int32), 2) == [[1], [0]]
    assert makespan([], []) == 0


@pytest.mark.parametrize("slots", [8, 1024])
@pytest.mark.parametrize("epsilon", [1e-12, 0.1])
def test_ten_thousand_jobs(slots, epsilon):
    lengths = np.random.default_rng(0).lognormal(5, 1, 10_000).clip(max=1024)
    queues = plan_makespan(lengths, slots, epsilon)
    assert sorted(i for queue in queues for i in queue) == list(range(10_000))
    assert makespan(queues, lengths) <= 1.02 * lower_bound(lengths, slots)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "slots"), [(32, 4), (32, 8), (256, 32), (512, 64)])
def test_within_three_percent_of_the_bound(n, slots, seed):
    lengths = np.ceil(np.random.default_rng(seed).lognormal(6, 1, n)).clip(max=1024).astype(int)
    assert makespan(plan_makespan(lengths, slots), lengths) <= 1.03 * lower_bound(lengths, slots)


modes = st.sampled_from(["on_policy", "partial"])
orders = st.sampled_from(["fifo", "least_attained"])
targets = st.sampled_from([0.0, 0.03, 0.05, 0.2, 0.5])


@st.composite
def pools(draw):
    """Lengths of groups, how many prompts an update takes, and the limit of a completion."""
    width = draw(st.integers(1, 3))
    group = st.lists(st.integers(1, 12), min_size=width, max_size=width)
    lengths = draw(st.lists(group, min_size=1, max_size=12))
    return lengths, draw(st.integers(1, len(lengths))), draw(st.sampled_from([12, 17, 25, 40]))


def flat(lengths):
    return [length for group in lengths for length in group]


@settings(deadline=None, max_examples=300)
@given(pools(), modes, orders, st.sampled_from(["group", "completion"]), st.integers(1, 14))
@example(([[2], [1], [1], [3]], 1, 12), "on_policy", "fifo", "completion", 2)  # a tie
@example(([[3, 1], [1, 3], [2, 2]], 1, 12), "on_policy", "fifo", "group", 3)  # drawn again
@example(([[9], [9], [9], [9]], 2, 12), "partial", "least_attained", "completion", 3)
def test_bubble_ratio_is_that_of_the_controller(pool, mode, order, unit, slots):
    lengths, update, limit = pool
    policy = SortedRound(update, len(lengths), len(lengths[0]), unit, mode)
    costs = {"step_time_base": 1.0, "per_running": 0, "per_kv_token": 0}
    drained = decode(lengths, policy, slots, order, limit, **costs)
    if unit == "completion":
        lengths, update = flat(lengths), update * len(lengths[0])
    ratio = pool_bubble_ratio(lengths, update, slots, mode, order, limit)
    assert ratio == bubble_ratio(drained.rounds)
    assert ratio == pytest.approx(drained.metrics["pool/bubble_ratio"], rel=1e-12)


@pytest.mark.parametrize("order", ["fifo", "least_attained"])
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_bubble_ratio_of_a_long_pool_is_that_of_the_controller(mode, order):
    lengths = np.random.default_rng(1).lognormal(4, 1, (64, 2)).clip(1, 400).astype(int).tolist()
    for unit, given_, update in (("group", lengths, 16), ("completion", flat(lengths), 32)):
        drained = decode(lengths, SortedRound(16, 64, 2, unit, mode), 24, order, 400)
        assert (drained.pauses > 0) == (order == "least_attained")
        ratio = pool_bubble_ratio(given_, update, 24, mode, order, 400)
        assert ratio == bubble_ratio(drained.rounds)


@settings(deadline=None)
@given(pools(), modes, orders, targets)
def test_recommended_slots_idle_no_more_than_that(pool, mode, order, target):
    lengths, update, limit = pool
    most = len(flat(lengths))
    slots = recommend_slots(lengths, update, target, mode, order, limit)
    fits = [
        pool_bubble_ratio(lengths, update, q, mode, order, limit) <= target
        for q in range(1, most + 1)
    ]
    assert fits[slots - 1]
    assert slots == most or not fits[slots]
    if mode == "partial" and order == "fifo":
        assert not any(fits[slots:])


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), targets, st.integers(1, 10), orders)
@example([1] * 19 + [19], 0.5, 1, "fifo")  # the longest last: 37 of 3 * 25 idle
def test_slots_that_are_sure_in_any_order(lengths, target, update, order):
    sure = 1 + target / (1 - target) * sum(lengths) / max(lengths) * (1 - 1e-12)
    slots = recommend_slots(lengths, update, target, "partial", order, 200)
    assert slots >= min(len(lengths), int(sure))


@settings(deadline=None)
@given(st.permutations(range(1, 25)), targets, st.sampled_from([4, 6, 8, 12]), orders)
def test_slots_that_are_sure_on_policy(lengths, target, update, order):
    # whole updates: none idles but the last, as long as there are no more slots than that
    sure = int(1 + target / (1 - target) * sum(lengths) / max(lengths) * (1 - 1e-12))
    for slots in range(1, min(sure, update) + 1):
        assert pool_bubble_ratio(lengths, update, slots, "on_policy", order, 24) <= target


def test_bubble_ratio_by_hand():
    # 3 and 1 run, then 4 for 2 steps; 4 goes on or begins anew, beside 2
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "partial") == 0
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([[3, 1], [4, 2]], 1, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 2, "on_policy") == 0  # one round
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 8, "on_policy") == 22 / 32  # slots without any


def test_bubble_ratio_of_turns_by_hand():
    def idle(update, mode, limit=16):
        return pool_bubble_ratio([4, 4, 8], update, 2, mode, "least_attained", limit)

    assert pool_bubble_ratio([4, 4, 8], 3, 2, "partial") == 8 / 24
    # turns of 2: 8 begins in step 2 beside the first 4, which ends in 4; the other goes on to 6
    assert idle(3, "partial") == idle(3, "on_policy") == 4 / 20
    assert idle(3, "partial", limit=64) == 8 / 24  # a turn of 8 is as long as they are
    # a first update of one: 8 has begun and goes on; or takes no turn, as it may be thrown away
    assert idle(1, "partial") == 4 / 20
    assert idle(1, "on_policy") == 8 / 24


def test_more_slots_may_idle_less_where_turns_are_taken():
    lengths = draw_lengths(0, 1200, 1.1)
    ratios = [
        pool_bubble_ratio(lengths, 128, q, "partial", "least_attained", 8192) for q in (40, 41, 42)
    ]
    assert ratios[0] <= 0.05 < ratios[1] and ratios[2] <= 0.05
    assert recommend_slots(lengths, 128, 0.05, "partial", "least_attained", 8192) == 42


def test_recommended_slots_by_hand():
    for mode in ("on_policy", "partial"):
        assert recommend_slots([7], 1, 0.0, mode) == 1
        assert recommend_slots([5] * 12, 12, 0.0, mode) == 12  # alike: none waits for another
        assert recommend_slots([5] * 12, 3, 0.0, mode) == 12
        assert recommend_slots([1, 1, 1, 9], 4, 0.0, mode) == 1
        assert recommend_slots([1, 1, 1, 9], 4, 0.49, mode) == 2  # 11 steps, 10 of 22 idle
        assert recommend_slots([9, 1, 1, 1], 4, 0.49, mode) == 2  # 9 steps, 6 of 18 idle
        assert recommend_slots([9, 1, 1, 1], 4, 0.34, mode) == 2
        assert recommend_slots([9, 1, 1, 1], 4, 0.9, mode) == 4
        assert recommend_slots(np.array([[9, 1], [1, 1]]), 1, 0.34, mode) >= 1
    # as much as the target is not too much
    assert pool_bubble_ratio([1] * 19, 19, 10, "partial") == 0.05
    assert recommend_slots([2, 1], 2, 0.25, "partial") == 2
    assert recommend_slots([2, 1], 2, 0.24, "partial") == 1


@pytest.mark.parametrize("order", ["fifo", "least_attained"])
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_slots_for_four_thousand_completions(mode, order):
    lengths = np.ceil(np.random.default_rng(0).lognormal(math.log(1200), 1.1, 4096)).clip(max=8192)
    how = mode, order, 8192
    slots = recommend_slots(lengths, 1024, 0.05, *how)
    ratios = [pool_bubble_ratio(lengths, 1024, q, *how) for q in (slots, slots + 1)]
    assert ratios[0] <= 0.05 < ratios[1]
    assert recommend_slots(lengths.reshape(-1, 8), 128, 0.05, *how) == pytest.approx(slots, rel=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_makespan([1], 1, 0), "`epsilon=0`: use more than 0"),
        (lambda: plan_makespan([1], 1, -0.1), "`epsilon=-0.1`"),
        (lambda: plan_makespan([1], 1, math.nan), "`epsilon=nan`"),
        (lambda: plan_makespan([1], 0), "`slots=0`: use 1 or more"),
        (lambda: longest_first([1], -1), "`slots=-1`: use 1 or more"),
        (lambda: lower_bound([1], 0), "`slots=0`: use 1 or more"),
        (lambda: plan_makespan([1, -2], 1), r"`lengths\[1\]=-2`: use a finite"),
        (lambda: longest_first([math.nan], 1), r"`lengths\[0\]=nan`"),
        (lambda: lower_bound([1, math.inf], 1), r"`lengths\[1\]=inf`"),
        (lambda: plan_makespan([1], 2, loads=[0, -1]), r"`loads\[1\]=-1`"),
        (lambda: plan_makespan([1], 2, loads=[0]), "`loads` has 1 values for 2 slots: give one"),
        (lambda: lower_bound([1], 1, []), "`loads` has 0 values for 1 slots"),
        (lambda: recommend_slots([1], 1, 1.0), "`bubble_ratio=1.0`: use 0 or more, and less"),
        (lambda: recommend_slots([1], 1, -0.1), "`bubble_ratio=-0.1`"),
        (lambda: recommend_slots([1], 0), "`update=0`: use 1 or more"),
        (lambda: recommend_slots([], 1), r"`lengths` has the shape \(0,\): give one for each"),
        (lambda: recommend_slots([[[1]]], 1), r"the shape \(1, 1, 1\)"),
        (lambda: recommend_slots([2, 0], 1), "`lengths` has 0: a completion has 1 token or more"),
        (lambda: recommend_slots([2, math.nan], 1), r"`lengths\[1\]=nan`"),
        (lambda: pool_bubble_ratio([1], 1, 0), "`slots=0`: use 1 or more"),
        (lambda: recommend_slots([1], 1, order="planned"), "`order='planned'`: use 'fifo' or 'lea"),
        (lambda: recommend_slots([1], 1, order="least_attained"), "a share of `max_completion_len"),
        (
            lambda: pool_bubble_ratio([1, 9], 1, 1, "partial", "least_attained", 8),
            "`lengths` has 9, which is more than `max_completion_length=8`",
        ),
        (lambda: makespan([[0], []], [1], [1]), "`loads` has 1 values for 2 slots"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
