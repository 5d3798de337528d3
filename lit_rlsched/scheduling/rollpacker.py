"""RollPacker: tensor-parallel sizes by the rounds' preemptions, and how long a reward may take."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lit_rlsched.settings import UsageError

RoundKind = Literal["short", "long"]

RISE = 1.05
"""Preemptions rise if they exceed this multiple of their average (RollPacker, section 4.2)."""
QUIET_ROUNDS = 4
"""Rounds in a row without a preemption after which the size is halved (same section)."""
SMOOTHING = 0.5
"""Weight of the newest round in the average."""


@dataclass(slots=True)
class _Kind:
    size: int
    average: float | None = 0.0
    """Moving average of preemptions; `None`: the next round sets it."""
    quiet: int = 0
    """Rounds in a row without a preemption."""
    patience: int = QUIET_ROUNDS
    """Quiet rounds after which the size is halved."""
    halved: bool = False
    """Whether the last change was a halving that may still prove wrong."""
    cooling: bool = False
    """Whether the next round does not change the size."""


class TensorParallelPlanner:
    """Chooses the tensor-parallel size of each kind of round from the preemptions of past rounds.

    RollPacker (arXiv 2509.21009, section 4.2). More devices per replica mean fewer copies of the
    weights and thus more key-value cache. A size doubles when the preemptions of its kind of round
    exceed 1.05 times their moving average, and halves after four rounds of that kind without any.
    Sizes are powers of two, so that a group stays inside one node. Details that the paper leaves
    open:

    - The average starts at 0, as if the first size had been profiled: a run that preempts in its
      first round doubles after it. The first round after a doubling sets the average.
    - The first round after a change does not change the size again.
    - If a halving is undone before as many quiet rounds have passed, the next halving needs twice
      as many, so that the planner does not alternate between two sizes.

    The planner only names a size. The engine decides where the devices come from: from other
    replicas (`dp * tp` constant) or from idle devices.

    Example:
        >>> planner = TensorParallelPlanner(size=1, maximum=8)
        >>> planner.observe("short", preemptions=12)
        >>> planner.size("short"), planner.size("long")
        (2, 1)
    """

    def __init__(self, size: int, maximum: int, minimum: int = 1) -> None:
        self.minimum, self.maximum = minimum, maximum
        self._kinds: dict[RoundKind, _Kind] = {"short": _Kind(size), "long": _Kind(size)}

    def size(self, kind: RoundKind) -> int:
        return self._kinds[kind].size

    def observe(self, kind: RoundKind, preemptions: int) -> None:
        """Update the size from a round that ran with the size of its kind."""
        state = self._kinds[kind]
        average = state.average
        rise = preemptions - (average or 0.0)
        state.average = preemptions if average is None else average + SMOOTHING * rise
        state.quiet = 0 if preemptions else state.quiet + 1
        if state.cooling:
            state.cooling = False
        elif average is not None and preemptions > RISE * average:
            if state.size < self.maximum:
                state.patience *= 2 if state.halved else 1
                self._change(state, 2 * state.size, average=None)
        elif state.quiet >= state.patience:
            state.halved = False
            if state.size > self.minimum:
                self._change(state, state.size // 2, average=0.0)

    def _change(self, state: _Kind, size: int, average: float | None) -> None:
        state.halved = size < state.size
        state.size, state.average, state.quiet, state.cooling = size, average, 0, True

    def state_dict(self) -> dict[str, Any]:
        return {kind: asdict(state) for kind, state in self._kinds.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, with sizes brought within the limits of this run."""
        for kind in self._kinds:
            state = _Kind(**state_dict[kind])
            state.size = min(max(state.size, self.minimum), self.maximum)
            self._kinds[kind] = state


def check_power_of_two(setting: str, size: int) -> None:
    """Refuse a size, a whole number of 1 or more, that halving and doubling do not lead to."""
    if size & (size - 1):
        raise UsageError(f"`{setting}` must be a power of two: use 1, 2, 4 or 8.")


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
