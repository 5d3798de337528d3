"""Timeline of a run: when trainer and engines work, and for whom they wait."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lit_rlsched.scheduling.lanes import (
    DECODE,
    DECODING,
    ENGINES,
    REWARDS,
    SPECULATE,
    TRAINER,
    WEIGHTS,
    Interval,
    filled_engine,
    filled_trainer,
    flatten,
)
from lit_rlsched.scheduling.spans import cut, seconds, union
from lit_rlsched.scheduling.trace import RolloutTrace

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

    @property
    def saved(self) -> float:
        """Seconds in which the trainer works and an engine decodes."""
        work = [i.span for i in self.lanes[TRAINER] if not i.waits_for and i.what != WEIGHTS]
        decoding = union(i.span for i in self._of_engines if i.what in DECODING)
        return seconds(cut(work, decoding)[0])

    @property
    def _of_engines(self) -> list[Interval]:
        return [i for lane, intervals in self.lanes.items() if lane != TRAINER for i in intervals]

    def totals(self) -> dict[str, float]:
        """Return seconds by name; those of the engines are means over them."""
        trainer, engines = self.lanes[TRAINER], self._of_engines
        parts = max(1, len(self.lanes) - 1)
        return {
            "seconds": self.end - self.start,
            "saved": self.saved,
            "trainer_busy": _total(trainer, None),
            **{f"trainer_waits_for_{whom}": _total(trainer, whom) for whom in (ENGINES, REWARDS)},
            "engines_busy": _total(engines, None) / parts,
            **{
                f"engines_wait_for_{whom}": _total(engines, whom) / parts
                for whom in (TRAINER, ENGINES, REWARDS)
            },
        }


class Timeline:
    """Collects intervals of trainer and engines, also from a rollout in a thread of its own.

    Args:
        now: Clock of the trainer; engines on the same node have the same.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._known: deque[Interval] = deque(maxlen=MOST)
        self._start = self._end = now()
        self._engines = 0

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
        if (origin := trace.origin) is None:
            return
        for start, end in trace.work:
            self.add(TRAINER, "gradients", origin + start, origin + end)
        steps = {name: np.array(column) for name, column in trace.steps.items()}
        of = steps.get("engine", np.zeros(len(steps["start"])))
        for engine in range(trace.engines):
            for what, column in ((DECODE, "running"), (SPECULATE, "proposed")):
                rows = (of == engine) & (steps[column] > 0)
                spans = zip(*(steps[side][rows].tolist() for side in ("start", "end")), strict=True)
                for start, end in union(spans, SHORT):
                    self.add(f"engine {engine}", what, origin + start, origin + end)

    def mark(self, moment: float | None = None) -> None:
        """Let the current lap end now, or at an earlier moment.

        What ended before the last mark is forgotten, in case that nobody asks for laps.
        """
        self._take(self._end)
        self._end = self.now() if moment is None else moment

    def _take(self, end: float) -> list[Interval]:
        """Return all intervals, and keep those that go on after `end`."""
        known = [self._known.popleft() for _ in range(len(self._known))]
        self._known.extend(interval for interval in known if interval.end > end)
        return known

    def lap(self) -> Lap:
        """Return the timeline from the end of the last lap to the last `mark`."""
        start, end, self._start = self._start, self._end, self._end
        known = self._take(end)
        names = [f"engine {engine}" for engine in range(self._engines)]
        flat = {
            name: flatten(name, (i for i in known if i.lane in (name, ENGINES)), start, end)
            for name in names
        }
        busy = {name: [i.span for i in flat[name] if not i.waits_for] for name in names}
        whole = [(start, end)] if start < end else []
        trainer = flatten(TRAINER, (i for i in known if i.lane == TRAINER), start, end)
        any_busy = union(span for spans in busy.values() for span in spans)
        trainer = filled_trainer(trainer, whole, any_busy if names else whole)
        lanes = {TRAINER: trainer}
        for name in names:
            others = union(s for other, spans in busy.items() if other != name for s in spans)
            lanes[name] = filled_engine(name, flat[name], whole, others, trainer)
        return Lap(start, end, lanes)


def _total(intervals: Iterable[Interval], waits_for: str | None) -> float:
    return seconds(i.span for i in intervals if i.waits_for == waits_for)
