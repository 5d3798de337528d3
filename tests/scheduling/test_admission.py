import dataclasses
from collections import Counter, deque
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.admission import Admission, CacheBudget, Order
from lit_rlsched.scheduling.planning import lower_bound, makespan, plan_makespan
from lit_rlsched.types import Request, Sampling

ORDERS = list(get_args(Order))


def requests(n, expected=None, limit=64):
    expected = expected or [None] * n
    return [Request(str(i), [1], i, Sampling(limit), expected=expected[i]) for i in range(n)]


def run(admission, lengths, expected=None):
    """Decode `lengths[i]` steps for request i; returns the order of admission and who ran when."""
    admission.push(requests(len(lengths), expected))
    drawn, order, running = {}, [], []
    while drawn or len(admission):
        for request in admission.pop(drawn):
            order.append(int(request.id))
            drawn[request.id] = 0
        if admission.refill == "continuous":
            assert len(drawn) == admission.slots or not len(admission), "a slot idles"
        running.append(len(drawn))
        drawn = {i: n + 1 for i, n in drawn.items() if n + 1 < lengths[int(i)]}
    return order, running


lengths = st.lists(st.integers(1, 20), max_size=30)
some_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def list_schedule(lengths, order, slots):
    """Each takes the slot that is free first; the end of the last."""
    free = deque([0] * slots)
    for i in order:
        free = deque(sorted(free))
        free.append(free.popleft() + lengths[i])
    return max(free)


@given(lengths, st.integers(1, 8))
def test_continuous_is_list_scheduling(lengths, slots):
    order, running = run(Admission(slots, "continuous"), lengths)
    assert order == list(range(len(lengths)))  # first in, first out, each exactly once
    assert all(n <= slots for n in running)
    assert len(running) == list_schedule(lengths, order, slots)


@given(lengths, st.integers(1, 8))
def test_rounds_wait_for_the_longest(lengths, slots):
    order, running = run(Admission(slots, "rounds"), lengths)
    assert order == list(range(len(lengths)))
    assert len(running) == sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


@given(lengths, st.integers(1, 8), st.sampled_from(["shortest_first", "longest_first"]))
def test_sorted_orders(lengths, slots, kind):
    order, running = run(Admission(slots, order=kind), lengths, lengths)
    sign = -1 if kind == "longest_first" else 1
    assert order == sorted(range(len(lengths)), key=lambda i: (sign * lengths[i], i))
    assert len(running) == (list_schedule(lengths, order, slots) if lengths else 0)


@given(some_lengths, st.integers(1, 6))
def test_planned_with_exact_lengths_ends_with_the_plan_or_before(lengths, slots):
    order, running = run(Admission(slots, order="planned"), lengths, lengths)
    assert sorted(order) == list(range(len(lengths)))
    assert len(running) <= makespan(plan_makespan(lengths, slots, 0.1), lengths)
    assert len(running) >= lower_bound(lengths, slots)


@given(some_lengths, st.integers(1, 8), st.sampled_from(ORDERS), st.data())
def test_wrong_or_missing_expectations_lose_nothing(lengths, slots, kind, data):
    anything = st.none() | st.floats(0, 1e9)
    expected = data.draw(st.lists(anything, min_size=len(lengths), max_size=len(lengths)))
    order, running = run(Admission(slots, order=kind), lengths, expected)
    assert sorted(order) == list(range(len(lengths)))
    # any schedule that never idles ends by then (Graham 1966)
    assert len(running) <= sum(lengths) / slots + (1 - 1 / slots) * max(lengths)


def ids(requests):
    return [r.id for r in requests]


@pytest.mark.parametrize("kind", ORDERS)
def test_clear_forgets_what_waited(kind):
    admission = Admission(2, order=kind)
    admission.push(requests(5, [3.0] * 5))
    admission.pop({})
    admission.clear()
    assert len(admission) == 0 and admission.pop({}) == []
    admission.push(requests(2, [3.0] * 2))  # the same ids again
    assert sorted(ids(admission.pop({}))) == ["0", "1"]


def test_a_slot_without_work_steals_the_shortest():
    admission = Admission(2, order="planned")
    admission.push(requests(5, [100, 30, 20, 15, 10]))  # planned as {0} and {1, 2, 3, 4}
    assert ids(admission.pop({})) == ["0", "1"]
    assert ids(admission.pop({"1": 3})) == ["4"]  # 0 was wrong and ended: not 2, which is next
    assert ids(admission.pop({"4": 2})) == ["2"]  # the slot of 1 goes on with its own


@given(st.lists(st.tuples(st.sampled_from([0, 0.5, 2, 5]), st.integers(0, 9)), max_size=9))
def test_orders_by_length_count_waits_for_tools(pairs):
    made = [
        dataclasses.replace(request, waits=waits)
        for request, (_, waits) in zip(
            requests(len(pairs), [n for n, _ in pairs]), pairs, strict=True
        )
    ]
    for order, sign in (("longest_first", -1), ("shortest_first", 1)):
        admission = Admission(1, order=order)
        admission.push(made)
        drawn = []
        while len(admission):
            drawn += [int(i) for i in ids(admission.pop({}))]
        steps = [tokens * (1 + waits) for tokens, waits in pairs]
        assert drawn == sorted(range(len(pairs)), key=lambda i: sign * steps[i])


@pytest.mark.parametrize("order", get_args(Order))
@given(returning=st.lists(st.booleans(), min_size=1, max_size=12))
def test_what_returns_from_an_environment_goes_first(order, returning):
    """In the order in which it came."""
    admission = Admission(1, order=order)
    ids = [f"{i}" for i in range(len(returning))]
    admission.push(
        Request(name, [1], i, Sampling(64), prefix_ids=(7,), expected=i, returns=back)
        for i, (name, back) in enumerate(zip(ids, returning, strict=True))
    )
    came = [admission.pop({})[0].id for _ in ids]
    back = [name for name, returns in zip(ids, returning, strict=True) if returns]
    assert sorted(came) == sorted(ids)
    assert came[: len(back)] == back


class Cache:
    """A paged cache that holds what runs, block by block, as vLLM does."""

    def __init__(self, budget, slots, refill="continuous", order="fifo"):
        self.budget = budget
        self.admission = Admission(slots, refill, order, budget=budget)
        self.drawn, self.requests = {}, {}
        self.peak_running = self.steps = self.pauses = self.at_once = 0

    @property
    def tokens(self):
        held = 0
        for i, n in self.drawn.items():
            request = self.requests[i]
            have = len(request.prompt_ids) + len(request.prefix_ids) + n
            held += self.budget.blocks(have - 1) if n else 0
        return held

    def run(self, requests, lengths):
        order, total, paused = [], Counter(), []
        whole = {r.id: r for r in requests}
        self.admission.push(requests)
        while self.drawn or len(self.admission):
            admitted = self.admission.pop(self.drawn, self.tokens)
            assert self.drawn or admitted, "stuck"
            for request in admitted:
                self.at_once += request.id in paused
                order.append(request.id)
                self.requests[request.id], self.drawn[request.id] = request, 0
            self.peak_running = max(self.peak_running, len(self.drawn))
            self.steps += 1
            paused = []
            for i in list(self.drawn):
                self.drawn[i] += 1
                total[i] += 1
            assert self.tokens <= self.budget.tokens, "the budget is overdrawn"
            for i in list(self.drawn):
                if total[i] == lengths[i] or total[i] == self.requests[i].limit:
                    del self.drawn[i]
                    if total[i] < lengths[i]:
                        paused.append(i)
            self.pauses += len(paused)
            self.admission.push(
                [
                    Request(i, whole[i].prompt_ids, 0, whole[i].sampling, (7,) * total[i])
                    for i in paused
                ]
            )
        assert total == lengths
        return order


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 64)), min_size=1, max_size=20),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(0, 300),
    st.sampled_from(["continuous", "rounds"]),
    st.sampled_from(ORDERS),
)
def test_the_cache_is_never_overdrawn_and_everything_ends(
    shapes, block, quantum, more, refill, order
):
    whole = -(-(12 + 64) // block) * block
    cache = Cache(CacheBudget(whole + more, block, quantum), 10, refill, order)
    waiting = [
        Request(str(i), (1,) * prompt, i, Sampling(64), expected=float(length))
        for i, (prompt, length) in enumerate(shapes)
    ]
    cache.run(waiting, {str(i): length for i, (_, length) in enumerate(shapes)})
    assert cache.peak_running <= 10
    if refill == "rounds":
        assert cache.pauses == 0


def test_what_has_just_paused_goes_on_first():
    # or all would take turns, and find their cache overwritten
    cache = Cache(CacheBudget(tokens=10 * 80, block=1, quantum=8), 64)
    waiting = [Request(str(i), (1,) * 10, i, Sampling(64)) for i in range(64)]
    cache.run(waiting, {r.id: 64 for r in waiting})
    assert cache.at_once > 0.8 * cache.pauses


@given(
    st.sampled_from(ORDERS),
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
    st.booleans(),
)
def test_what_is_discarded_does_not_come_and_the_others_keep_their_order(
    order, lengths, ids, started
):
    """As if they had never been there; but a plan is kept, though it was made with them."""
    gone = {str(i) for i in ids if i < len(lengths)}
    waiting = requests(len(lengths), [float(n) for n in lengths])
    waiting = [dataclasses.replace(r, pause_at=2) if r.seed % 3 == 0 else r for r in waiting]
    admission, without = Admission(1, order=order), Admission(1, order=order)
    admission.push(waiting)
    first = {r.id for r in admission.pop({})} if started else set()
    admission.discard(gone - first)
    admission.discard({"nobody"})
    without.push(r for r in waiting if r.id not in gone | first)
    assert len(admission) == len(without)
    came = []
    for room in (admission, without):
        came.append([])
        while len(room):
            came[-1] += [r.id for r in room.pop({})]
    assert sorted(came[0]) == sorted(came[1]) == sorted({r.id for r in waiting} - gone - first)
    if order != "planned":
        assert came[0] == came[1]


def test_a_discarded_quantum_is_forgotten():
    """Else what is submitted under its name in another round would go first."""
    admission = Admission(2, budget=CacheBudget(24, 1, 4))
    admission.push(requests(3))
    (first, *_) = admission.pop({})
    assert first.pause_at == 4
    admission.push([dataclasses.replace(first, prefix_ids=(7,) * 4, pause_at=None)])
    assert [r.id for r in admission._first] == [first.id]
    admission.discard({first.id})
    assert not admission._first
    admission.push([dataclasses.replace(first, pause_at=None)])
    assert not admission._first
