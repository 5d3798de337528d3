import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.trace import STEP_COLUMNS, RolloutTrace, Step


def test_bubble_ratio_by_hand():
    # 2 slots. Step 1: both run (1 s). Step 2: one (2 s). Step 3, after a pause of 1 s: one (1 s).
    trace = RolloutTrace(slots=2)
    trace.admitted("a", 10.0)
    trace.admitted("b", 10.0)
    trace.take(Step(10.0, 11.0, running=2, kv_tokens=6))
    trace.left("b", 11.0, tokens=1)
    trace.take(Step(11.0, 13.0, running=1, kv_tokens=4))
    trace.take(Step(14.0, 15.0, running=1, kv_tokens=5))
    trace.left("a", 15.0, tokens=3)
    assert trace.bubble_ratio == pytest.approx((0 * 1 + 1 * 2 + 1 * 2) / (5 * 2))
    assert (trace.decode_steps, trace.slot_steps, trace.busy_slot_steps) == (3, 6, 4)
    assert trace.tokens == 4
    assert trace.seconds == 5.0
    assert trace.spans["slot"] == [1, 0]
    assert trace.spans["end_step"] == [1, 3]


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20), st.integers(1, 5))
def test_bubble_ratio_is_zero_where_all_slots_always_run(durations, slots):
    trace = RolloutTrace(slots)
    for i in range(slots):
        trace.admitted(str(i), 0.0)
    now = 0.0
    for seconds in durations:
        trace.take(Step(now, now + seconds, running=slots, kv_tokens=0))
        now += seconds
    assert trace.bubble_ratio == 0.0


def test_a_freed_slot_is_taken_again():
    trace = RolloutTrace(slots=1)
    for i in range(3):
        trace.admitted(str(i), float(i))
        trace.take(Step(i, i + 1.0, 1, 0))
        trace.left(str(i), i + 1.0, 1)
    assert trace.spans["slot"] == [0, 0, 0]
    tables = trace.tables()
    assert list(tables) == ["steps", "spans"]
    assert tables["steps"].column_names == list(STEP_COLUMNS)
    assert tables["spans"].num_rows == 3


def test_gradients_overlap_with_the_steps_they_are_computed_in():
    trace = RolloutTrace(slots=1)
    trace.admitted("a", 10.0)
    for start, end in ((10, 12), (12.5, 14), (14, 16)):
        trace.take(Step(start, end, 1, 0))
    for start, end in ((11, 13), (13.5, 14.5), (15.5, 18), (20, 21)):
        trace.worked(start, end)
    assert trace.work_seconds == 2 + 1 + 2.5 + 1
    assert trace.overlap_seconds == (1 + 0.5) + 1 + 0.5
    assert trace.tables()["work"].to_pydict() == {
        "start": [1, 3.5, 5.5, 10],
        "end": [3, 4.5, 8, 11],
    }


def test_an_empty_trace():
    assert RolloutTrace(4).bubble_ratio == 0.0
    assert RolloutTrace(4).seconds == 0.0
    assert RolloutTrace(4).slots == 4


def test_gradients_of_a_round_that_decoded_nothing():
    trace = RolloutTrace(slots=1)
    trace.worked(1.0, 2.0)
    assert trace.work_seconds == trace.overlap_seconds == 0


def test_every_figure_of_a_round_by_hand():
    trace = RolloutTrace(slots=3, dynamic=True)
    assert trace.slots == 0 and trace.tokens == trace.pauses == trace.total("preemptions") == 0
    trace.take(Step(10.0, 11.0, 2, 20, 1, 12, 3, 0, 8, 3, admitted=["a", "b"], left={"a": 4}))
    trace.take(Step(12.0, 14.0, 1, 15, 5, 0, 0, 2, 4, 0, 2, left={"b": 5}))
    trace.take(Step(14.0, 14.5, 1, 30, 2, 7, 6, 1, admitted=["a"], left={"a": 2, "nobody": 9}))
    assert trace.steps == {
        "start": [0.0, 2.0, 4.0],
        "end": [1.0, 4.0, 4.5],
        "running": [2, 1, 1],
        "kv_tokens": [20, 15, 30],
        "decode_steps": [1, 5, 2],
        "prefill_tokens": [12, 0, 7],
        "cached_tokens": [3, 0, 6],
        "preemptions": [0, 2, 1],
        "proposed": [8, 4, 0],
        "accepted": [3, 0, 0],
        "drafter_failures": [0, 2, 0],
    }
    assert trace.spans == {
        "request": ["a", "b", "a"],
        "slot": [0, 1, 0],
        "start": [0.0, 0.0, 4.0],
        "end": [1.0, 4.0, 4.5],
        "start_step": [0, 0, 6],
        "end_step": [1, 6, 8],
        "tokens": [4, 5, 2],
    }
    assert trace.tokens == 11 and trace.pauses == 1 and trace.seconds == 4.5
    assert trace.total("preemptions") == 3 and trace.total("cached_tokens") == 9
    assert trace.slots == trace.peak_running == 2
    assert trace.slot_steps == 16 and trace.busy_slot_steps == 2 + 5 + 2
    assert trace.bubble_ratio == (0 + 3 + 0.5) / (4.5 * 2)
    trace.dynamic = False
    assert trace.slots == 3 and trace.slot_steps == 24


def test_the_lowest_free_slot_is_taken():
    trace = RolloutTrace(slots=3)
    trace.take(Step(0.0, 1.0, 3, 0, admitted="abc", left={"c": 1, "a": 1}))
    trace.take(Step(1.0, 2.0, 2, 0, admitted="d", left={"d": 1, "b": 1}))
    assert dict(zip(trace.spans["request"], trace.spans["slot"], strict=True)) == {
        "c": 2,
        "a": 0,
        "d": 0,
        "b": 1,
    }


def test_nothing_leaves_before_anything_came():
    trace = RolloutTrace(slots=1)
    with pytest.raises(AssertionError, match="before anything was admitted"):
        trace.take(Step(0.0, 1.0, 0, 0))
