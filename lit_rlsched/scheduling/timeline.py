"""Timeline of a run: when trainer and engines work, and for whom they wait."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lit_rlsched.scheduling.trace import RolloutTrace

Span = tuple[float, float]
"""Start and end."""


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Return what at least one of the spans covers, with gaps of at most `gap`, in order."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1] + gap:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


TRAINER, ENGINES, REWARDS = "trainer", "engines", "rewards"
DECODE, WEIGHTS, OTHER, WAIT = "decode", "weights", "other", "wait"
UPDATE = "update"


class Interval(NamedTuple):
    """What a lane did from `start` to `end`, in seconds of `time.monotonic`."""

    lane: str
    """`trainer`, `engine 0`, ..., or `engines` for all of them."""
    what: str
    start: float
    end: float
    waits_for: str | None = None
    """`trainer`, `engines` or `rewards`; None if it works."""


def holding(intervals: Iterable[Interval], edges: Sequence[float]) -> list[Interval | None]:
    """Return which of a lane's intervals holds between each edge and the next.

    Decoding hides everything else, and what began later hides what began earlier.
    """
    held: list[Interval | None] = [None] * (len(edges) - 1)
    for interval in sorted(intervals, key=lambda i: (i.what == DECODE, i.start, -i.end)):
        first, last = bisect_left(edges, interval.start), bisect_left(edges, interval.end)
        last = min(last, len(held))
        held[first:last] = [interval] * (last - first)
    return held


SHORT = 0.01
"""Gaps between two steps of an engine of at most so many seconds count as busy."""
MOST = 100_000
"""Intervals that are kept until `Timeline.lap`; the oldest are forgotten first."""


Lap = dict[str, list[Interval]]
"""A part of the timeline: intervals that follow one another without gaps, by lane."""


class Timeline:
    """Collects intervals of trainer and engines, also from a rollout in a thread of its own.

    `now` is the clock of the trainer; engines on the same node have the same.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._known: deque[Interval] = deque(maxlen=MOST)
        self._start = self._end = now()
        self._engines = 0
        self.last: Lap | None = None
        """The newest lap."""

    def add(
        self, lane: str, what: str, start: float, end: float, waits_for: str | None = None
    ) -> None:
        """Record what a lane did; of two at the same time the one that began later holds."""
        if start < end:
            self._known.append(Interval(lane, what, start, end, waits_for))

    @contextmanager
    def doing(self, what: str, *lanes: str, waits_for: str | None = None) -> Iterator[None]:
        """Record what lanes do during the block."""
        start = self.now()
        try:
            yield
        finally:
            end = self.now()
            for lane in lanes:
                self.add(lane, what, start, end, waits_for)

    def add_trace(self, trace: RolloutTrace) -> None:
        """Record the steps of a rollout's engines, and gradients that were computed beside it."""
        self._engines = max(self._engines, trace.engines)
        for start, end in trace.work_times:
            self.add(TRAINER, "gradients", start, end)
        if (origin := trace.origin) is None:
            return
        steps = {name: np.array(column) for name, column in trace.steps.items()}
        of = steps.get("engine", np.zeros(len(steps["start"])))
        for engine in range(trace.engines):
            rows = (of == engine) & (steps["running"] > 0)
            spans = zip(*(steps[side][rows].tolist() for side in ("start", "end")), strict=True)
            for start, end in union(spans, SHORT):
                self.add(f"engine {engine}", DECODE, origin + start, origin + end)

    def mark(self, moment: float | None = None) -> None:
        """Let the current lap end now, or at an earlier moment.

        Intervals that ended before the last mark are dropped, in case nobody asks for laps.
        """
        self._take(self._end)
        self._end = self.now() if moment is None else moment

    def _take(self, end: float) -> list[Interval]:
        """Return all intervals, and keep those that go on after `end`."""
        known = [self._known.popleft() for _ in range(len(self._known))]
        self._known.extend(interval for interval in known if interval.end > end)
        return known

    def lap(self) -> Lap:
        """Return the timeline from the end of the last lap to the last `mark`.

        A trainer of which nothing is known, or that waits for engines that are idle, does other
        work. An engine without work waits for rewards, for engines that work, or for the trainer.
        """
        start, end, self._start = self._start, self._end, self._end
        known = [i for i in self._take(end) if i.start < end and i.end > start]
        times = (
            {start, end} | {max(start, i.start) for i in known} | {min(end, i.end) for i in known}
        )
        edges = sorted(times)
        names = [f"engine {engine}" for engine in range(self._engines)]
        held = {
            name: holding((i for i in known if i.lane in (name, ENGINES)), edges) for name in names
        }
        of_trainer = holding((i for i in known if i.lane == TRAINER), edges)
        lanes: Lap = {name: [] for name in (TRAINER, *names)}
        for place, (begin, stop) in enumerate(pairwise(edges)):
            now = {name: held[name][place] for name in names}
            busy = {name for name, does in now.items() if does and not does.waits_for}
            own = of_trainer[place]
            if own is not None and own.waits_for == ENGINES and names and not busy:
                own = None
            found = {TRAINER: (own.what, own.waits_for) if own else (OTHER, None)}
            for name, does in now.items():
                whom = ENGINES if busy - {name} else TRAINER
                if own is not None and own.waits_for == REWARDS:
                    whom = REWARDS
                found[name] = (does.what, does.waits_for) if does else (WAIT, whom)
            for name, (what, waits_for) in found.items():
                lane = lanes[name]
                if lane and (lane[-1].what, lane[-1].waits_for) == (what, waits_for):
                    lane[-1] = lane[-1]._replace(end=stop)
                else:
                    lane.append(Interval(name, what, begin, stop, waits_for))
        self.last = lanes
        return lanes
