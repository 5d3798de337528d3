"""When a process that does not answer is taken to hang, from how long its answers have taken."""

from collections import deque

WINDOW = 1000
"""Answers of a kind that are remembered."""


class AnswerTimeouts:
    """How long a process may take to answer: a multiple of what such answers took in this run.

    `max(floor, factor * p99)`, the 99th percentile over the last 1,000 answers of the same kind. An
    answer to something larger than ever was asked may take longer in proportion: steps that prefill
    long prompts. The first answer of its kind since the process started may take `first`, as it may
    compile; the start itself may take `start`, as it reads the weights.

    Args:
        floor: Seconds.
        factor: Of the percentile.
        first: Seconds.
        start: Seconds.
    """

    def __init__(
        self,
        floor: float = 120.0,
        factor: float = 20.0,
        first: float = 600.0,
        start: float = 1800.0,
    ) -> None:
        self.floor, self.factor, self.first, self.start = floor, factor, first, start
        self._seconds: dict[str, deque[float]] = {}
        self._largest: dict[str, int] = {}
        self._known: set[str] = set()
        """Kinds that were answered since the process started."""

    def starts(self) -> None:
        """Another process takes the place of the one before."""
        self._known.clear()

    def observe(self, kind: str, seconds: float, size: int = 0) -> None:
        """Take in how long an answer took, and how much was asked for."""
        self._known.add(kind)
        self._seconds.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
        self._largest[kind] = max(size, self._largest.get(kind, 0))

    def limit(self, *kinds: str, size: int = 0) -> float:
        """Seconds to wait for an answer, which may be of any of these kinds."""
        return max(self._limit(kind, size) for kind in kinds)

    def _limit(self, kind: str, size: int) -> float:
        least = self.floor
        if kind == "start":
            least = max(least, self.start)
        elif kind not in self._known:
            least = max(least, self.first)
        seconds = sorted(self._seconds.get(kind, ()))
        if not seconds:
            return least
        percentile = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        growth = max(1.0, size / self._largest[kind]) if self._largest[kind] else 1.0
        return max(least, self.factor * percentile * growth)


class RunningClock:
    """Seconds that this process has waited, and run meanwhile.

    It is told the time in short ticks. One that lasts longer than a tick counts as a tick: the
    process itself was stopped, or the machine slept.

    Args:
        tick: Seconds between two calls, while all is well.
    """

    def __init__(self, tick: float) -> None:
        self.tick = tick
        self.seconds = 0.0

    def advance(self, seconds: float) -> float:
        """So much time has passed since the last call; all that counts until now."""
        self.seconds += min(seconds, self.tick)
        return self.seconds
