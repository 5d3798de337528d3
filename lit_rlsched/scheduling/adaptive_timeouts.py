"""How long a reward function may take, from how long it took for correct completions."""

import math
from typing import Any


class AdaptiveTimeout:
    """A limit for each task: a multiple of the longest a correct completion of it took to score.

    RollPacker (arXiv 2509.21009, section 4.3): `T = min(max(minimum, scale * anchor), maximum)`,
    where the anchor is the longest that scoring a correct completion of the same task has taken.
    Only correct ones count: code that hangs would raise the limit that is to stop it. A task of
    which nobody has seen a correct completion has the maximum.

    Args:
        scale: The paper's lambda.
        minimum: Seconds.
        maximum: Seconds.
    """

    def __init__(self, scale: float, minimum: float, maximum: float) -> None:
        self.scale, self.minimum, self.maximum = scale, minimum, maximum
        self._anchors: dict[str, float] = {}

    def anchored(self, task: str) -> bool:
        """Whether a correct completion of the task was seen."""
        return task in self._anchors

    def of(self, task: str) -> float:
        """Seconds that a call may take."""
        anchor = self._anchors.get(task, math.inf)
        return min(max(self.minimum, self.scale * anchor), self.maximum)

    def observe(self, task: str, seconds: float, correct: bool) -> None:
        """Take in how long a call took that came to its end."""
        if correct:
            self._anchors[task] = max(seconds, self._anchors.get(task, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """The anchors."""
        return {"anchors": dict(self._anchors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with those of a checkpoint."""
        self._anchors = dict(state["anchors"])
