from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.rollout.types import Request, Sampling
from lit_rlsched.scheduling.admission import Admission, slots_for_budget


def requests(n):
    return [Request(str(i), [1], i, Sampling(4)) for i in range(n)]


def run(admission, lengths):
    """Decode `lengths[i]` steps for request i; returns the order of admission and who ran when."""
    admission.push(requests(len(lengths)))
    left, order, running = {}, [], []
    while left or len(admission):
        for request in admission.pop(len(left)):
            order.append(int(request.id))
            left[int(request.id)] = lengths[int(request.id)]
        running.append(len(left))
        left = {i: n - 1 for i, n in left.items() if n > 1}
    return order, running


lengths = st.lists(st.integers(1, 20), max_size=30)


@given(lengths, st.integers(1, 8))
def test_continuous_is_list_scheduling(lengths, slots):
    order, running = run(Admission(slots, "continuous"), lengths)
    assert order == list(range(len(lengths)))  # first in, first out, each exactly once
    assert all(n <= slots for n in running)
    free = deque([0] * slots)
    for n in lengths:  # each takes the slot that is free first
        free = deque(sorted(free))
        free.append(free.popleft() + n)
    assert len(running) == max(free)


@given(lengths, st.integers(1, 8))
def test_rounds_wait_for_the_longest(lengths, slots):
    order, running = run(Admission(slots, "rounds"), lengths)
    assert order == list(range(len(lengths)))
    assert len(running) == sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


@given(lengths, st.integers(1, 8))
def test_no_slot_idles_while_a_request_waits(lengths, slots):
    admission = Admission(slots)
    admission.push(requests(len(lengths)))
    admitted = len(admission.pop(0))
    assert admitted == min(slots, len(lengths))
    assert admission.pop(slots) == []


def test_clear_returns_what_waited():
    admission = Admission(2)
    admission.push(requests(5))
    admission.pop(0)
    assert [r.id for r in admission.clear()] == ["2", "3", "4"]
    assert len(admission) == 0


def test_slots_for_budget():
    # Qwen3-1.7B in bf16: 28 layers, 8 heads of 128, keys and values
    per_token = 2 * 28 * 8 * 128 * 2
    assert per_token == 112 * 1024
    assert slots_for_budget(2 * 2**30, per_token, 1024) == 18
    with pytest.raises(ValueError, match=r"less than one completion may take: 117440512 bytes"):
        slots_for_budget(10**8, per_token, 1024)
