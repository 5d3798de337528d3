"""Spans of time: what two of them share, and what one has alone."""

from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""Start and end."""


def cut(spans: Sequence[Span], by: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return the parts of the spans that lie inside of others, and those that do not.

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


def seconds(spans: Iterable[Span]) -> float:
    """Return the length of all spans together."""
    return sum(end - start for start, end in spans)
