import pytest
import torch
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


def test_gradients_overlap_with_the_steps_they_are_computed_in():
    trace = RolloutTrace(slots=1)
    trace.admitted("a", 10.0)
    for start, end in ((10, 12), (12.5, 14), (14, 16)):
        trace.take(Step(start, end, 1, 0))
    for start, end in ((11, 13), (13.5, 14.5), (15.5, 18), (20, 21)):
        trace.work_times.append((start, end))
    assert trace.work_seconds == 2 + 1 + 2.5 + 1
    assert trace.overlap_seconds == (1 + 0.5) + 1 + 0.5


def test_an_empty_trace():
    assert RolloutTrace(4).bubble_ratio == 0.0
    assert RolloutTrace(4).seconds == 0.0
    assert RolloutTrace(4).slots == 4
    assert RolloutTrace(4).peak_running == 0


def test_gradients_of_a_round_that_decoded_nothing():
    trace = RolloutTrace(slots=1)
    trace.work_times.append((1.0, 2.0))
    assert trace.work_seconds == 1.0 and trace.overlap_seconds == 0


def test_every_figure_of_a_round_by_hand():
    trace = RolloutTrace(slots=3, dynamic=True)
    assert trace.slots == 0 and trace.tokens == trace.pauses == trace.total("preemptions") == 0
    trace.take(Step(10.0, 11.0, 2, 20, 1, 12, 3, 0, admitted=["a", "b"], left={"a": 4}))
    trace.take(Step(12.0, 14.0, 1, 15, 5, 0, 0, 2, left={"b": 5}))
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
    tables = trace.tables()
    assert tables["spans"].to_pydict() == trace.spans
    assert tables["steps"]["running"].to_pylist() == [2, 5, 2]  # slots times decode steps
    assert trace.tokens == 11 and trace.pauses == 1 and trace.seconds == 4.5
    assert trace.total("preemptions") == 3 and trace.total("cached_tokens") == 9
    assert trace.slots == trace.peak_running == 2
    assert trace.slot_steps == 16 and trace.busy_slot_steps == 2 + 5 + 2
    assert trace.bubble_ratio == (0 + 3 + 0.5) / (4.5 * 2)
    trace.dynamic = False
    assert trace.slots == 3 and trace.slot_steps == 24


def test_nothing_leaves_before_anything_came():
    trace = RolloutTrace(slots=1)
    with pytest.raises(AssertionError, match=r"^a step before anything was admitted"):
        trace.take(Step(0.0, 1.0, 0, 0))


def test_the_turns_of_several_engines_by_hand():
    """An engine that had nothing to decode gets a row for it once it decodes again."""
    trace = RolloutTrace(slots=6, engines=3)
    trace.take_engine_step(
        {
            1: Step(11.0, 13.0, 1, 5, admitted=["b"], left={"b": 1}),
            0: Step(10.0, 12.0, 2, 7, admitted=["a", "c"]),
        }
    )
    trace.take_engine_step(
        {0: Step(13.0, 14.0, 2, 9, 3, left={"c": 4}), 2: Step(13.5, 14.5, 1, 2, admitted=["d"])}
    )
    trace.take_engine_step({0: Step(14.0, 16.0, 1, 6), 1: Step(14.25, 16.5, 1, 4, admitted=["e"])})
    rows = zip(*(trace.steps[name] for name in ("engine", *STEP_COLUMNS[:5])), strict=True)
    assert [*rows] == [
        (1, 1.0, 3.0, 1, 5, 1),
        (0, 0.0, 2.0, 2, 7, 1),
        (0, 3.0, 4.0, 2, 9, 3),
        (2, 0.0, 3.5, 0, 0, 0),
        (2, 3.5, 4.5, 1, 2, 1),
        (0, 4.0, 6.0, 1, 6, 1),
        (1, 3.0, 4.25, 0, 0, 0),
        (1, 4.25, 6.5, 1, 4, 1),
    ]
    assert trace.origin == 10.0 and trace.decode_steps == 1 + 3 + 1
    assert trace.peak_running == 3


@st.composite
def rollouts(draw):
    """Slots, engines and turns."""
    places, running = draw(st.integers(1, 3)), [{} for _ in range(draw(st.integers(1, 3)))]
    turns, now = [], 10.0
    for number in range(draw(st.integers(1, 6))):
        turn, took = {}, draw(st.integers(1, 8)) / 4
        for engine, of in enumerate(running):
            least = 0 if of or engine else 1  # the first engine is always busy
            admitted = [
                f"{engine}:{number}/{i}" for i in range(draw(st.integers(least, places - len(of))))
            ]
            of |= dict.fromkeys(admitted, 0)
            for name in of:
                of[name] += draw(st.integers(1, 3))
            left = {name: tokens for name, tokens in of.items() if draw(st.booleans())}
            steps, kv_tokens = draw(st.integers(1, 3)), sum(of.values())
            if of:
                turn[engine] = Step(
                    now, now + took, len(of), kv_tokens, steps, admitted=admitted, left=left
                )
            running[engine] = {name: of[name] for name in of if name not in left}
        turns.append(turn)
        now += took
    for engine, of in enumerate(running):
        if of:
            turns[-1][engine].left |= of
    return places * len(running), len(running), turns


def traced(slots, engines, turns):
    trace = RolloutTrace(slots, engines=engines)
    for turn in turns:
        trace.take_engine_step(turn)
    return trace


@given(rollouts())
def test_a_request_has_the_lowest_free_slot_of_its_engine(rollout):
    slots, engines, turns = rollout
    places, expected = slots // engines, {}
    free = [{*range(i * places, (i + 1) * places)} for i in range(engines)]
    for turn in turns:
        for engine, step in turn.items():
            for name in step.admitted:
                expected[name] = min(free[engine])
                free[engine].remove(expected[name])
            free[engine] |= {expected[name] for name in step.left}
    trace = traced(slots, engines, turns)
    assert dict(zip(trace.spans["request"], trace.spans["slot"], strict=True)) == expected
    assert trace.peak_running == max(sum(s.running for s in turn.values()) for turn in turns)


@given(rollouts())
def test_a_trace_of_a_checkpoint_is_the_one_that_was_saved(tmp_path_factory, rollout):
    file = tmp_path_factory.mktemp("trace") / "state.pt"
    trace = traced(*rollout)
    trace.work_times.append((11.0, 12.5))
    torch.save(trace.state_dict(), file)
    state = torch.load(file, weights_only=True)
    again = RolloutTrace.from_state(state)
    assert again.tables() == trace.tables()
    assert (again.bubble_ratio, again.origin) == (trace.bubble_ratio, trace.origin)


def test_a_trace_is_saved_once_its_rollout_is_over():
    trace = RolloutTrace(slots=1)
    trace.admitted("a", 0.0)
    with pytest.raises(AssertionError, match=r"^a request still runs$"):
        trace.state_dict()
