from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.admission import Admission, CacheBudget, WaitingQueue
from lit_rlsched.types import Request, Sampling


def request(name, expected=None, prefix=0, limit=20, prompt=1):
    ids = (1,) * prompt
    return Request(str(name), ids, 0, Sampling(limit), (7,) * prefix, expected=expected)


def filled(order, requests):
    queue = WaitingQueue(order)
    for one in requests:
        queue.push(one)
    return queue


def names(queue, slot=0):
    """All that waits, in its order."""
    found = []
    while len(queue):
        assert queue.peek(slot) is queue.peek(slot)
        found.append(queue.pop(slot).id)
    return "".join(found)


ALL = [request("a", 5.0, 3), request("b", None, 1), request("c", 9.0), request("d", 5.0, 1)]
ORDERS = {"fifo": "abcd", "shortest_first": "badc", "longest_first": "cadb"}
ORDERS |= {"planned": "cadb"}


@pytest.mark.parametrize(("order", "expected"), ORDERS.items())
def test_each_order(order, expected):
    queue = filled(order, ALL)
    if order == "planned":
        queue.plan([0.0])
    assert len(queue) == 4
    assert names(queue) == expected
    with pytest.raises(IndexError):
        queue.peek(0)


LATER = st.sampled_from(["push", "push later", "pop", "discard"])


@given(st.sampled_from([*ORDERS]), st.lists(LATER, max_size=40), st.randoms())
def test_who_is_later_comes_after_all_others_and_is_counted(order, actions, random):
    queue, waiting = WaitingQueue(order), {}
    for number, action in enumerate(actions):
        if action.startswith("push"):
            one = request(number, random.choice([None, 1.0, 2.0]), random.randrange(3))
            waiting[one.id] = replace(one, later=action == "push later")
            queue.push(waiting[one.id])
        elif action == "pop" and waiting:
            if order == "planned":
                queue.plan([0.0])
            others = {name for name in waiting if not waiting[name].later}
            popped = queue.pop(0).id
            assert popped in (others or waiting)
            del waiting[popped]
        elif action == "discard" and waiting:
            gone = random.choice([*waiting])
            queue.discard([gone, "nobody"])
            del waiting[gone]
        assert len(queue) == len(waiting)


def planned(expected, slots):
    queue = WaitingQueue("planned")
    for i, n in enumerate(expected):
        queue.push(request(i, n, limit=200))
    queue.plan([0.0] * slots)
    return queue


def test_a_slot_that_was_not_planned_for_steals():
    queue = planned([4, 3, 2, 1], 2)
    assert queue.pop(7).id == "3" and queue.pop(2).id == "2"


def test_a_plan_of_one_request_stands_until_the_next():
    queue = planned([5.0], 1)
    queue.push(request("short", 1.0))
    assert queue.peek(0).id == "0"


def test_new_requests_count_as_changes():
    queue = planned([float(n) for n in range(20, 6, -1)], 1)
    queue.push(request("new", 50.0))
    queue.plan([0.0])
    assert queue.peek(0).id == "0", "one of 15"
    queue.push(request("newer", 60.0))
    queue.plan([0.0])
    assert queue.peek(0).id == "newer", "two of 16"
    queue.discard([str(n) for n in range(14)])
    queue.push(request("newest", 70.0))
    queue.plan([0.0])
    assert queue.peek(0).id == "newest", "one of 3"


def test_a_plan_knows_what_each_slot_still_runs():
    queue = WaitingQueue("planned")
    for i, n in enumerate([9.0, 4.0, 4.0, 1.0]):
        queue.push(request(i, n))
    queue.plan([9.0, 0.0])
    assert [queue.pop(slot).id for slot in (1, 0, 1, 0)] == list("0123")


def test_the_budget_by_hand():
    budget = CacheBudget(1000, 16)
    assert [budget.blocks(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    one = request("a", limit=30, prompt=10)
    assert budget.cost(one) == budget.growth(one, 0) == 48
    assert [budget.growth(one, n) for n in (1, 7, 8, 30)] == [32, 32, 16, 0]
    assert budget.growth(replace(one, prefix_ids=(7,) * 5), 2) == 32
    assert budget.growth(replace(one, prefix_ids=(7,) * 5), 3) == 16
    assert budget.cost(replace(one, pause_at=6)) == 16


def admitted(admission, running=(), *kv_tokens):
    return [(r.id, r.pause_at) for r in admission.pop(dict(running), *kv_tokens)]


@pytest.mark.parametrize(
    ("tokens", "quanta"),
    [
        (42, [None, None]),
        (41, [4, None]),  # room for both as long as they may get is missing by one
        (25, [4, 4]),
        (26, [4, None]),
        (10, [4, 4]),
        (9, [4]),
        (5, [4]),
        (4, []),
    ],
)
def test_a_quantum_where_whole_completions_do_not_fit(tokens, quanta):
    admission = Admission(2, budget=CacheBudget(tokens, 1, 4))
    admission.push([request(i) for i in range(3)])
    assert [pause_at for _, pause_at in admitted(admission)] == quanta


def test_a_quantum_is_shorter_than_the_whole():
    admission = Admission(2, budget=CacheBudget(9, 1, 4))
    admission.push([request(0, limit=4), request(1, limit=4)])
    assert admitted(admission) == [("0", None)]


SHAPES = st.tuples(st.integers(1, 9), st.integers(0, 9), st.sampled_from([None, 0.5, 7.0, 20.0]))


@given(st.lists(SHAPES, min_size=1, max_size=9))
def test_a_plan_is_for_as_many_slots_as_hold_usual_requests(shapes):
    admission = Admission(9999, order="planned", budget=CacheBudget(9999, 1, 1))
    for i, (prompt, prefix, expected) in enumerate(shapes):
        admission.push([request(i, expected, prefix, prompt=prompt)])
    tokens = sum(prompt + prefix + (expected or 0) for prompt, prefix, expected in shapes)
    assert len(admission._loads({})) == 9999 // (tokens // len(shapes) + 1)


def test_room_is_what_neither_is_in_use_nor_may_be_taken():
    for tokens, expected in ((9, []), (10, [("1", 4)])):
        admission = Admission(2, budget=CacheBudget(tokens, 1, 4))
        admission.push([request(0), request(1)])
        admission.discard(["1"])
        assert admitted(admission) == [("0", 4)]
        admission.push([request(1)])
        # it has drawn 3 tokens, has 3 in the cache, and may take 2 more
        assert admitted(admission, {"0": 3}, 3) == expected


def test_what_paused_goes_on_first_and_the_last_to_pause_before_others():
    admission = Admission(3, budget=CacheBudget(15, 1, 4))
    admission.push([request(i) for i in range(4)])
    assert admitted(admission) == [("0", 4), ("1", 4), ("2", 4)]
    admission.push([request(0, prefix=4), request(2, prefix=4), request("p", limit=3)])
    assert [r for r, _ in admitted(admission, {"1": 4}, 4)] == ["2"]


def test_rounds_have_no_quanta():
    admission = Admission(2, "rounds", budget=CacheBudget(30, 1, 4))
    admission.push([request(i) for i in range(3)])
    assert admitted(admission) == [("0", None)]
    assert admitted(admission, {"0": 1}, 1) == []
    assert admitted(admission) == [("1", None)]


def test_a_plan_is_for_the_slots_that_the_cache_has_room_for():
    """Cache for two of 40 tokens and a quantum: the other slots have no share, and steal."""
    admission = Admission(8, order="planned", budget=CacheBudget(109, 1, 10))
    expected = [60.0, 50.0, 40.0, 30.0, 20.0, 40.0]
    admission.push([request(i, n - 1, limit=100) for i, n in enumerate(expected)])
    assert [r for r, _ in admitted(admission)][:4] == ["0", "1", "4", "3"]


@pytest.fixture
def plans(monkeypatch):
    """The loads of each plan that is asked for; none is made, so slots take the shortest."""
    seen = []
    monkeypatch.setattr(WaitingQueue, "plan", lambda queue, loads: seen.append(loads))
    return seen


def test_a_plan_knows_what_runs_in_each_slot(plans):
    admission = Admission(5, order="planned")
    admission.push([request("a", 10.0), request("b"), request("c", 5.0)])
    assert [r for r, _ in admitted(admission)] == ["b", "c", "a"]
    admission.push([request("d")])
    admitted(admission, {"a": 4, "b": 0, "c": 9})
    assert plans == [[0.0] * 5, [0.0, 0.0, 6.0, 0.0, 0.0]]
    admission.push([request("e"), request("f")])
    assert admitted(admission, dict.fromkeys("abcd", 9)) == [("e", None)]
    admitted(admission, dict.fromkeys("abcde", 9))
    assert len(plans) == 3, "none without a free slot"


def test_a_plan_is_for_all_slots_up_to_the_last_that_runs(plans):
    huge = request("huge", 1e4)  # the cache holds less than one
    admission = Admission(8, order="planned", budget=CacheBudget(1000, 1, 5))
    admission.push([huge])
    admitted(admission)
    assert plans.pop() == [0.0]
    admission.clear()
    admission.push([request(name) for name in "abcd"])
    admitted(admission)
    admission.push([huge])
    admitted(admission, dict.fromkeys("abcd", 1))
    assert plans.pop() == [0.0] * 4


def test_only_what_paused_after_a_quantum_goes_on_first():
    admission = Admission(1, order="longest_first")
    probe = replace(request("p", 2.0), pause_at=8)
    admission.push([request("a", 5.0), probe])
    assert admitted(admission) == [("p", 8)]
    admission.push([replace(probe, pause_at=None)])
    assert admitted(admission) == [("a", None)]


def test_a_quantum_counts_once():
    admission = Admission(2, budget=CacheBudget(30, 1, 4))
    admission.push([request("a"), request("b")])
    assert admitted(admission) == [("a", 4), ("b", None)]
    admission.push([request("a", prefix=4)])
    assert admitted(admission) == [("a", None)]
    admission.push([request("c"), request("a")])  # drawn again in another round
    assert [r for r, _ in admitted(admission)] == ["c", "a"]
