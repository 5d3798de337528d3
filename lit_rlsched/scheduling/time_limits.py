"""A time limit of rewards, learned from how long scores have taken."""

import math
from typing import Any


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
