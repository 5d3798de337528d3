"""Timeline of a run: when trainer and engines work, and for whom they wait."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lit_rlsched.scheduling.trace import RolloutTrace

Span = tuple[float, float]
"""Start and end."""


def cut(spans: Sequence[Span], by: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Split spans into the parts inside of `by` and the parts outside.

    Both are in order, and neither overlaps itself.
    """
    inside: list[Span] = []
    outside: list[Span] = []
    first = 0
    for at, end in spans:
        while first < len(by) and by[first][1] <= at:
            first += 1
        other = first
        while other < len(by) and by[other][0] < end:
            start, stop = by[other]
            if at < start:
                outside.append((at, start))
            inside.append((max(at, start), min(end, stop)))
            at, other = stop, other + 1
        if at < end:
            outside.append((at, end))
    return inside, outside


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

    @property
    def span(self) -> Span:
        return self.start, self.end


def flatten(lane: str, intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Cut a lane's intervals so that at each moment from `start` to `end` at most one is left.

    Decoding hides everything else, and what began later hides what began earlier.
    """
    inside = [i for i in intervals if i.start < end and i.end > start]
    inside.sort(key=lambda i: i.start)
    times = {max(start, i.start) for i in inside} | {min(end, i.end) for i in inside}
    current: list[tuple[bool, float, float, int]] = []
    flat: list[Interval] = []
    coming = 0
    for begin, stop in pairwise(sorted(times)):
        while coming < len(inside) and inside[coming].start <= begin:
            i = inside[coming]
            heapq.heappush(current, (i.what != DECODE, -i.start, i.end, coming))
            coming += 1
        while current and current[0][2] <= begin:
            heapq.heappop(current)
        if current:
            _, what, _, _, whom = inside[current[0][3]]
            if flat and flat[-1][1:] == (what, flat[-1].start, begin, whom):
                begin = flat.pop().start
            flat.append(Interval(lane, what, begin, stop, whom))
    return flat


SHORT = 0.01
"""Gaps between two steps of an engine of at most so many seconds count as busy."""
MOST = 100_000
"""Intervals that are kept until `Timeline.lap`; the oldest are forgotten first."""


@dataclass(frozen=True)
class Lap:
    """A part of the timeline, in which each lane has one interval at every moment."""

    start: float
    end: float
    lanes: dict[str, list[Interval]]
    """Intervals that follow one another, by lane: `trainer`, `engine 0`, ..."""


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
        known = self._take(end)
        whole = [(start, end)]
        lanes = {
            name: flatten(name, (i for i in known if i.lane in (name, ENGINES)), start, end)
            for name in (f"engine {engine}" for engine in range(self._engines))
        }
        busy = {name: [i.span for i in lane if not i.waits_for] for name, lane in lanes.items()}
        any_busy = union(span for spans in busy.values() for span in spans) if lanes else whole

        trainer = []
        of_trainer = flatten(TRAINER, (i for i in known if i.lane == TRAINER), start, end)
        works = cut(whole, [i.span for i in of_trainer])[1]
        for interval in of_trainer:
            if interval.waits_for != ENGINES:
                trainer.append(interval)
                continue
            waits, more = cut([interval.span], any_busy)
            trainer += [interval._replace(start=a, end=b) for a, b in waits]
            works += more
        trainer += [Interval(TRAINER, OTHER, *span) for span in union(works)]
        trainer.sort(key=lambda i: i.start)

        rewards = [i.span for i in trainer if i.waits_for == REWARDS]
        for name, lane in lanes.items():
            gaps = cut(whole, [i.span for i in lane])[1]
            others = union(s for other, spans in busy.items() if other != name for s in spans)
            for whom, layer in ((REWARDS, rewards), (ENGINES, others), (TRAINER, whole)):
                inside, gaps = cut(gaps, layer)
                lane += [Interval(name, WAIT, *span, whom) for span in inside]
            lane.sort(key=lambda i: i.start)
        self.last = Lap(start, end, {TRAINER: trainer, **lanes})
        return self.last
