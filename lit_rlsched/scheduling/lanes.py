"""Lanes of a timeline: what the trainer or an engine did at each moment, and for whom it waited."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lit_rlsched.scheduling.spans import Span, cut, union

TRAINER, ENGINES, REWARDS = "trainer", "engines", "rewards"
DECODE, WEIGHTS, OTHER, WAIT = "decode", "weights", "other", "wait"
SPECULATE = "speculate"
"""Decoding with draft tokens."""
DECODING = {DECODE, SPECULATE}


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
            heapq.heappush(current, (i.what not in DECODING, -i.start, i.end, coming))
            coming += 1
        while current and current[0][2] <= begin:
            heapq.heappop(current)
        if current:
            _, what, _, _, whom = inside[current[0][3]]
            if flat and flat[-1][1:] == (what, flat[-1].start, begin, whom):
                begin = flat.pop().start
            flat.append(Interval(lane, what, begin, stop, whom))
    return flat


def filled_trainer(
    known: Iterable[Interval], whole: Sequence[Span], engines: Sequence[Span]
) -> list[Interval]:
    """Fill the gaps with other work, which is also what a wait for idle engines is."""
    known = [*known]
    spans = [i.span for i in known]
    works = cut(whole, spans)[1]
    found = []
    for interval in known:
        if interval.waits_for != ENGINES:
            found.append(interval)
            continue
        waits, more = cut([interval.span], engines)
        found += [interval._replace(start=a, end=b) for a, b in waits]
        works += more
    found += [Interval(TRAINER, OTHER, *span) for span in union(works)]
    return sorted(found, key=lambda i: i.start)


def filled_engine(
    lane: str,
    known: Sequence[Interval],
    whole: Sequence[Span],
    others: Sequence[Span],
    trainer: Sequence[Interval],
) -> list[Interval]:
    """Fill the gaps: with waits for rewards, for other engines that work, or for the trainer."""
    found = [*known]
    _, gaps = cut(whole, [i.span for i in known])
    rewards = [i.span for i in trainer if i.waits_for == REWARDS]
    for whom, layer in ((REWARDS, rewards), (ENGINES, others), (TRAINER, whole)):
        inside, gaps = cut(gaps, layer)
        found += [Interval(lane, WAIT, *span, whom) for span in inside]
    return sorted(found, key=lambda i: i.start)
