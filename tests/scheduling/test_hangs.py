import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.time_limits import WINDOW, AnswerTimeouts, RunningClock

SECONDS = st.floats(0, 1000)


def observed(*answers: tuple[str, float, int]) -> AnswerTimeouts:
    timeouts = AnswerTimeouts()
    for kind, seconds, size in answers:
        timeouts.observe(kind, seconds, size)
    return timeouts


def test_the_rule():
    timeouts = AnswerTimeouts()
    assert timeouts.limit("start") == 1800.0
    assert timeouts.limit("decode") == 600.0
    for _ in range(99):
        timeouts.observe("decode", 0.05)
    assert timeouts.limit("decode") == 120.0
    for _ in range(2):
        timeouts.observe("decode", 10.0)
    assert timeouts.limit("decode") == 200.0, "20 times the 99th percentile"
    assert timeouts.limit("decode", "prefill") == 600.0, "none has prefilled yet"
    timeouts.starts()
    assert timeouts.limit("decode") == 600.0, "it may compile again"
    timeouts.observe("decode", 0.05)
    assert timeouts.limit("decode") == 200.0, "what was seen before holds"


def test_compilation_and_long_prefills_count():
    compiled = observed(("decode", 90.0, 0), *[("decode", 0.1, 0)] * 50)
    assert compiled.limit("decode") == 1800.0
    prefilled = observed(*[("decode", 0.1, 0)] * 1000, *[("prefill", 30.0, 4096)] * 3)
    assert prefilled.limit("decode", "prefill", size=100) == 600.0
    assert prefilled.limit("decode", "prefill", size=8192) == 1200.0
    assert prefilled.limit("decode") == 120.0


@given(st.lists(st.tuples(st.sampled_from(["decode", "prefill"]), SECONDS, st.integers(0, 9999))))
def test_no_answer_like_those_before_is_ever_too_late(answers):
    """However long 99 % of them took, twenty times as long is waited for, and the floor."""
    timeouts = observed(*answers)
    for kind in ("decode", "prefill"):
        limit = timeouts.limit(kind)
        assert limit >= 120.0 and timeouts.limit(kind, size=10**6) >= limit
        assert timeouts.limit("decode", "prefill") >= limit
        seen = sorted(seconds for name, seconds, _ in answers if name == kind)
        assert sum(seconds * 20 > limit for seconds in seen) <= len(seen) / 100


@given(st.lists(SECONDS, min_size=1), SECONDS)
def test_it_remembers_so_much_and_no_more(before, now):
    timeouts = observed(*[("decode", seconds, 0) for seconds in [*before, *[now] * WINDOW]])
    assert timeouts.limit("decode") == max(120.0, 20.0 * now)


def test_what_is_older_than_the_window_is_forgotten():
    timeouts = observed(*[("decode", 500.0, 0)] * WINDOW, *[("decode", 50.0, 0)] * WINDOW)
    assert timeouts.limit("decode") == 1000.0


@given(st.lists(SECONDS), st.floats(0.1, 10))
def test_a_clock_that_stops_with_the_process(ticks, tick):
    clock = RunningClock(tick)
    total = [clock.advance(seconds) for seconds in ticks]
    assert clock.seconds <= min(sum(ticks), len(ticks) * tick) * (1 + 1e-9)
    assert total == sorted(total)
    assert clock.seconds == pytest.approx(sum(s for s in ticks if s <= tick)) or max(ticks) > tick


def test_each_setting_of_the_rule():
    timeouts = AnswerTimeouts(floor=1.0, factor=2.0, first=30.0, start=400.0)
    assert timeouts.limit("start") == 400.0 and timeouts.limit("decode") == 30.0
    timeouts.observe("decode", 0.1)
    assert timeouts.limit("decode") == 1.0
    assert timeouts.limit("decode", "start") == 400.0
    timeouts.observe("start", 300.0)
    assert timeouts.limit("start") == 600.0
    timeouts.observe("decode", 5.0)
    assert timeouts.limit("decode") == 10.0, "the 99th percentile of two is the larger"
    lavish = AnswerTimeouts(floor=50.0, factor=2.0, first=30.0, start=40.0)
    assert lavish.limit("start") == lavish.limit("decode") == 50.0


def test_more_than_ever_was_asked_may_take_longer_in_proportion():
    timeouts = AnswerTimeouts(floor=0.0, factor=2.0)
    for seconds, size in ((1.0, 10), (3.0, 40), (2.0, 20)):
        timeouts.observe("prefill", seconds, size)
    assert [timeouts.limit("prefill", size=n) for n in (0, 39, 40, 60, 80)] == [6, 6, 6, 9, 12]
    timeouts.observe("decode", 1.0)  # of no size
    assert timeouts.limit("decode", size=99) == 2.0
    timeouts.observe("ask", 1.0, 1)
    assert timeouts.limit("ask", size=3) == 6.0


def test_the_percentile_of_many():
    timeouts = AnswerTimeouts(floor=0.0, factor=1.0)
    for seconds in range(200):
        timeouts.observe("decode", float(seconds))
    assert timeouts.limit("decode") == 198.0  # 99 % took less


def test_a_clock_counts_ticks():
    clock = RunningClock(0.5)
    assert clock.seconds == 0.0
    assert [clock.advance(s) for s in (0.25, 0.5, 60.0, 0.0)] == [0.25, 0.75, 1.25, 1.25]
