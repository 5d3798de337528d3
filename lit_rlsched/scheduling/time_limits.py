"""Time limits that detect a hanging process, learned from how long its answers have taken."""

import math
from collections import deque
from typing import Any

WINDOW = 1000
"""Number of answers of each kind that are remembered."""


class AnswerTimeouts:
    """Time limits for the answers of a process, by kind of answer.

    The limit is `max(floor, factor * p99)`, where `p99` is the 99th percentile over the last 1,000
    answers of the same kind. A request larger than all before it (a step that prefills long
    prompts) may take longer in proportion. The first answer of a kind after a start of the process
    may take `first`, since it may compile; the start itself, which reads the weights, `start`.
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
        """Tell that a new process replaces the last one."""
        self._known.clear()

    def observe(self, kind: str, seconds: float, size: int = 0) -> None:
        """Record how long an answer took; `size` is the amount of work, such as prompt tokens."""
        self._known.add(kind)
        self._seconds.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
        self._largest[kind] = max(size, self._largest.get(kind, 0))

    def limit(self, *kinds: str, size: int = 0) -> float:
        """Seconds to wait for an answer that may be of any of these kinds."""
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
        percentile = seconds[int(0.99 * len(seconds))]
        growth = max(1.0, size / self._largest[kind]) if self._largest[kind] else 1.0
        return max(least, self.factor * percentile * growth)


class RunningClock:
    """Counts the seconds for which this process has waited while it was running.

    A tick that takes longer than `tick` seconds counts as `tick`: this process was stopped, or the
    machine was suspended.
    """

    def __init__(self, tick: float) -> None:
        self.tick = tick
        self.seconds = 0.0

    def advance(self, seconds: float) -> float:
        """Add the seconds since the last call, and return the total."""
        self.seconds += min(seconds, self.tick)
        return self.seconds


class AdaptiveTimeout:
    """A time limit per task: a multiple of the longest scoring time of a correct completion.

    RollPacker (arXiv 2509.21009, section 4.3): `T = min(max(minimum, scale * anchor), maximum)`,
    where the anchor is the longest time that scoring a correct completion of the task has taken.
    Incorrect ones do not count: code that hangs would raise its own limit. Without a correct
    completion so far, the limit is `maximum`.
    """

    def __init__(self, scale: float, minimum: float, maximum: float) -> None:
        self.scale, self.minimum, self.maximum = scale, minimum, maximum
        self._anchors: dict[str, float] = {}

    def anchored(self, task: str) -> bool:
        """Whether the task has had a correct completion."""
        return task in self._anchors

    def of(self, task: str) -> float:
        anchor = self._anchors.get(task, math.inf)
        return min(max(self.minimum, self.scale * anchor), self.maximum)

    def observe(self, task: str, seconds: float, correct: bool) -> None:
        """Record the duration of a call that ended by itself."""
        if correct:
            self._anchors[task] = max(seconds, self._anchors.get(task, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {"anchors": dict(self._anchors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._anchors = dict(state["anchors"])
