"""The timeline: every moment of every lane has one meaning."""

from hypothesis import example, given
from hypothesis import strategies as st

from lit_rlsched.scheduling import timeline as timelines
from lit_rlsched.scheduling.timeline import (
    DECODE,
    ENGINES,
    OTHER,
    REWARDS,
    TRAINER,
    WEIGHTS,
    Interval,
    Timeline,
    holding,
    union,
)
from lit_rlsched.scheduling.trace import RolloutTrace, Step


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def trace_of(steps, engines=1):
    """Trace of steps `(engine, start, end)`, one after the other."""
    trace = RolloutTrace(slots=engines, engines=engines)
    for number, (engine, start, end) in enumerate(steps):
        name = str(number)
        step = Step(start, end, running=1, kv_tokens=1, admitted=[name], left={name: 1})
        trace.take_engine_step({engine: step})
    return trace


def lap_of(intervals, until, traces=()):
    clock = Clock()
    timeline = Timeline(clock)
    for interval in intervals:
        timeline.add(*interval)
    for trace in traces:
        timeline.add_trace(trace)
    clock.time = until
    timeline.mark()
    return timeline.lap()


def shown(lap, lane):
    return [i[1:] for i in lap[lane]]


def test_a_synchronous_round_by_hand():
    lap = lap_of(
        [
            (TRAINER, "update", 0, 4),
            (TRAINER, WEIGHTS, 4, 5),
            (ENGINES, WEIGHTS, 4, 5),
            (TRAINER, "rollout", 5, 11, ENGINES),
            (TRAINER, "rewards", 9, 11, REWARDS),
        ],
        until=11,
        traces=[trace_of([(0, 5, 7), (0, 7.001, 9)])],
    )
    assert shown(lap, TRAINER) == [
        ("update", 0, 4, None),
        (WEIGHTS, 4, 5, None),
        ("rollout", 5, 9, ENGINES),
        ("rewards", 9, 11, REWARDS),
    ]
    assert shown(lap, "engine 0") == [
        ("wait", 0, 4, TRAINER),
        (WEIGHTS, 4, 5, None),
        (DECODE, 5, 9, None),
        ("wait", 9, 11, REWARDS),
    ]


def test_a_round_drawn_ahead_by_hand():
    """The rollout goes on beside the update; the trainer then waits for its end and verifies."""
    lap = lap_of(
        [
            (TRAINER, "update", 0, 4),
            (TRAINER, "rollout", 4, 6, ENGINES),
            (TRAINER, "verify", 6.5, 8),
            (TRAINER, "rollout", 6.25, 9, ENGINES),
        ],
        until=9,
        traces=[trace_of([(0, 1, 6)]), trace_of([(0, 7, 9)])],
    )
    assert shown(lap, TRAINER) == [
        ("update", 0, 4, None),
        ("rollout", 4, 6, ENGINES),
        (OTHER, 6, 6.5, None),
        ("verify", 6.5, 8, None),
        ("rollout", 8, 9, ENGINES),
    ]
    assert shown(lap, "engine 0") == [
        ("wait", 0, 1, TRAINER),
        (DECODE, 1, 6, None),
        ("wait", 6, 7, TRAINER),
        (DECODE, 7, 9, None),
    ]


def test_an_engine_that_has_ended_waits_for_the_others():
    lap = lap_of(
        [(TRAINER, "rollout", 0, 10, ENGINES)],
        until=12,
        traces=[trace_of([(0, 0, 4), (1, 0, 10), (0, 11, 12)], engines=2)],
    )
    assert shown(lap, "engine 0") == [
        (DECODE, 0, 4, None),
        ("wait", 4, 10, ENGINES),
        ("wait", 10, 11, TRAINER),
        (DECODE, 11, 12, None),
    ]
    assert shown(lap, "engine 1") == [
        (DECODE, 0, 10, None),
        ("wait", 10, 11, TRAINER),
        ("wait", 11, 12, ENGINES),
    ]
    assert shown(lap, TRAINER) == [("rollout", 0, 10, ENGINES), (OTHER, 10, 12, None)]


def test_an_engine_that_waits_for_rewards_beside_an_update():
    lap = lap_of(
        [(TRAINER, "update", 0, 5), (ENGINES, "rewards", 1, 5, REWARDS)],
        until=5,
        traces=[trace_of([(0, 0, 2)])],
    )
    assert shown(lap, "engine 0") == [(DECODE, 0, 2, None), ("rewards", 2, 5, REWARDS)]


def test_gradients_are_computed_beside_a_rollout():
    trace = trace_of([(0, 2, 8)])
    trace.work_times.append((3, 5))
    lap = lap_of([(TRAINER, "rollout", 2, 8, ENGINES)], 8, [trace])
    assert ("gradients", 3, 5, None) in shown(lap, TRAINER)


def test_spans_that_touch_are_one():
    assert union([(3, 4), (0, 2), (1, 1.5), (2, 2.5)]) == [(0, 2.5), (3, 4)]


def test_steps_at_most_ten_ms_apart_are_one_interval():
    trace = trace_of([(0, 0, 1), (0, 1.01, 2), (0, 2.02, 3)])
    lap = lap_of([(TRAINER, "update", 0, 3)], 3, [trace])
    assert [i for i in shown(lap, "engine 0") if i[0] == DECODE] == [
        (DECODE, 0, 2, None),
        (DECODE, 2.02, 3, None),
    ]


def test_an_interval_across_the_end_of_a_lap_is_in_both():
    clock = Clock()
    timeline = Timeline(clock)
    assert timeline.last is None
    clock.time = 4.0
    timeline.mark()
    timeline.add(TRAINER, "update", 3, 6)
    timeline.add_trace(trace_of([(0, 3, 5)]))
    first = timeline.lap()
    clock.time = 7.0
    timeline.mark()
    second = timeline.lap()
    assert timeline.last is second
    assert shown(first, TRAINER) == [(OTHER, 0, 3, None), ("update", 3, 4, None)]
    assert shown(second, TRAINER) == [("update", 4, 6, None), (OTHER, 6, 7, None)]
    assert shown(first, "engine 0") == [("wait", 0, 3, TRAINER), (DECODE, 3, 4, None)]
    assert shown(second, "engine 0") == [(DECODE, 4, 5, None), ("wait", 5, 7, TRAINER)]
    clock.time = 8.0
    timeline.mark()
    assert shown(timeline.lap(), TRAINER) == [(OTHER, 7, 8, None)]


def test_laps_that_nobody_asks_for_are_forgotten():
    clock = Clock()
    timeline = Timeline(clock)
    for number in range(50):
        timeline.add(TRAINER, "update", number, number + 0.5)
        clock.time = number + 1.0
        timeline.mark()
    assert len(timeline._known) <= 2


def test_the_oldest_intervals_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(timelines, "MOST", 2)
    lap = lap_of([(TRAINER, "update", i, i + 0.5) for i in range(4)], until=4)
    assert [i.start for i in lap[TRAINER] if i.what == "update"] == [2, 3]


def test_a_lap_may_end_before_it_is_marked():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.add(TRAINER, "update", 1, 5)
    clock.time = 5.0
    timeline.mark(3.0)
    assert shown(timeline.lap(), TRAINER) == [(OTHER, 0, 1, None), ("update", 1, 3, None)]
    timeline.mark()
    assert shown(timeline.lap(), TRAINER) == [("update", 3, 5, None)]
    timeline.mark()
    assert timeline.lap() == {TRAINER: []}, "no time has passed"


def test_a_trainer_waits_for_engines_of_which_nothing_is_known():
    lap = lap_of([(TRAINER, "rollout", 1, 5, ENGINES)], until=5)
    assert set(lap) == {TRAINER}
    assert shown(lap, TRAINER) == [(OTHER, 0, 1, None), ("rollout", 1, 5, ENGINES)]


moments = st.integers(0, 30).map(float)
intervals = st.lists(
    st.tuples(
        st.sampled_from([TRAINER, ENGINES]),
        st.sampled_from(["update", "rollout", WEIGHTS, "verify"]),
        moments,
        moments,
        st.sampled_from([None, ENGINES, REWARDS]),
    ),
    max_size=8,
)
steps = st.lists(st.tuples(st.integers(0, 1), moments, st.integers(1, 5).map(float)), max_size=6)


@given(intervals, steps, moments)
@example([(TRAINER, "rollout", 0.0, 10.0, ENGINES)], [(0, 2.0, 2.0), (1, 6.0, 2.0)], 10.0)
def test_every_lane_has_one_meaning_at_each_moment(recorded, steps, until):
    trace = trace_of(
        [(e, start, start + d) for e, start, d in sorted(steps, key=lambda s: s[1])], 2
    )
    recorded = [i if i[0] == TRAINER or i[4] != ENGINES else (*i[:4], REWARDS) for i in recorded]
    lap = lap_of(recorded, until, [trace])
    assert set(lap) == {TRAINER, "engine 0", "engine 1"}
    for name, lane in lap.items():
        at = 0.0
        for interval in lane:
            assert interval.lane == name
            assert interval.start == at < interval.end
            at = interval.end
        assert at == until
    both = [
        (a, b)
        for a, b in zip([x / 2 for x in range(60)], [x / 2 for x in range(1, 61)], strict=True)
        if b <= until and all(_waits(lap, lane, (a + b) / 2) for lane in lap)
    ]
    whom = [{_waits(lap, lane, (a + b) / 2) for lane in lap} for a, b in both]
    assert all(w == {REWARDS} for w in whom), "they wait for each other"


def _waits(lap, lane, at):
    return next(i.waits_for for i in lap[lane] if i.start <= at < i.end)


def test_later_intervals_hide_earlier_ones():
    intervals = [(TRAINER, "z", 0, 1), (TRAINER, "y", 2, 4), (TRAINER, "x", 0, 9)]
    assert holding([Interval(*intervals[1])], [0, 2, 4, 8]) == [None, intervals[1] + (None,), None]
    assert shown(lap_of(intervals, 8), TRAINER) == [
        ("z", 0, 1, None),
        ("x", 1, 2, None),
        ("y", 2, 4, None),
        ("x", 4, 8, None),
    ]
