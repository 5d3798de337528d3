"""How many devices a round's model is split over, by how often requests lost their cache."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

RoundKind = Literal["short", "long"]

RISE = 1.05
"""Times the average above which preemptions rise (RollPacker, section 4.2)."""
QUIET_ROUNDS = 4
"""Rounds in a row without a preemption after which the size is halved (the same)."""
SMOOTHING = 0.5
"""Weight of the newest round in the average."""


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of rounds."""

    size: int
    average: float | None = 0.0
    """Of preemptions; `None`: the next round sets it."""
    quiet: int = 0
    """Rounds in a row without a preemption."""
    patience: int = QUIET_ROUNDS
    """As many of them halve the size."""
    halved: bool = False
    """Whether the last change was to halve, and may yet be wrong."""
    cooling: bool = False
    """Whether the next round changes nothing."""


class TensorParallelPlanner:
    """Chooses the tensor-parallel size of each kind of rounds from the preemptions of earlier ones.

    RollPacker (arXiv 2509.21009, section 4.2). More devices per replica mean fewer copies of the
    weights, and so more key-value cache: a size doubles when the preemptions of its kind rise above
    1.05 times their moving average, and halves after four rounds of its kind without any. Sizes are
    powers of two: a group stays inside one node. What the paper leaves open:

    - The average starts at zero, as if the first size had been profiled: a run that preempts from
      the start doubles after its first round. After a doubling the next round sets the average
      anew, so that what is left, at another size, is no rise.
    - After a change the next round of that kind changes nothing.
    - A halving that is taken back before as many quiet rounds was wrong, and twice as many must
      come before the next: the same size is not tried every few rounds for ever.

    It says a size; where the devices come from is the engine's business: whether other replicas
    give way (`dp * tp` constant) or idle devices are taken.

    Args:
        size: That both kinds begin with.
        maximum: Largest size.
        minimum: Smallest size.

    Raises:
        ValueError: a size is no power of two, or they are out of order.

    Example:
        >>> planner = TensorParallelPlanner(size=1, maximum=8)
        >>> planner.observe("short", preemptions=12)
        >>> planner.size("short"), planner.size("long")
        (2, 1)
    """

    def __init__(self, size: int, maximum: int, minimum: int = 1) -> None:
        check_sizes(minimum=minimum, size=size, maximum=maximum)
        if not minimum <= size <= maximum:
            raise ValueError(
                f"A tensor-parallel size of {size} is not within minimum={minimum} and "
                f"maximum={maximum}."
            )
        self.minimum, self.maximum = minimum, maximum
        self._proven: set[int] = set()
        self._kinds: dict[RoundKind, _Kind] = {"short": _Kind(size), "long": _Kind(size)}

    def size(self, kind: RoundKind) -> int:
        """Of the next round of that kind."""
        return self._kinds[kind].size

    def observe(self, kind: RoundKind, preemptions: int) -> None:
        """Learn from a round that was drawn with the size of its kind."""
        state = self._kinds[kind]
        self._proven.add(state.size)
        average = state.average
        state.average = preemptions if average is None else _mix(average, preemptions)
        state.quiet = 0 if preemptions else state.quiet + 1
        if state.cooling:
            state.cooling = False
        elif average is not None and preemptions > RISE * average:
            self._double(state)
        elif state.quiet >= state.patience:
            state.halved = False
            if state.size > self.minimum:
                self._change(state, state.size // 2, average=0.0)

    def exclude(self, size: int, working: int) -> bool:
        """Stay within the sizes that work, as this one turned out not to.

        Args:
            size: Larger or smaller than all that rounds were drawn with.
            working: One that works.

        Returns:
            Whether it is. Nothing changes where it has worked before.
        """
        proven = self._proven | {working}
        if size > max(proven):
            self.maximum = size // 2
        elif size < min(proven):
            self.minimum = 2 * size
        else:
            return False
        for state in self._kinds.values():
            within = min(max(state.size, self.minimum), self.maximum)
            if state.size != within:
                self._change(state, within, average=None)
        return True

    def restart(self, kind: RoundKind, working: int, start: Callable[[int], None]) -> str | None:
        """Start an engine with the size of the next round, or with another if it does not start.

        Args:
            kind: Of the next round.
            working: Size that the engine has.
            start: Starts it anew with a size.

        Returns:
            What to tell the user where it did not start. What it raises with a size that has worked
            before is raised: then something else is wrong.
        """
        size = self.size(kind)
        try:
            start(size)
        except Exception as error:
            if not self.exclude(size, working):
                raise
            instead = self.size(kind)
            start(instead)
            return (
                f"The engine does not start with `tensor_parallel_size={size}`: {error!r}. The run "
                f"goes on with {instead}, and `ParallelismPlanner` does not try {size} again."
            )
        return None

    def _double(self, state: _Kind) -> None:
        if state.size == self.maximum:
            return
        if state.halved:
            state.patience *= 2
        self._change(state, 2 * state.size, average=None)

    def _change(self, state: _Kind, size: int, average: float | None) -> None:
        state.halved = size < state.size
        state.size, state.average, state.quiet, state.cooling = size, average, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Sizes and what they follow from."""
        return {kind: asdict(state) for kind, state in self._kinds.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with those of a checkpoint, as far as the limits of this run allow."""
        for kind in self._kinds:
            state = _Kind(**state_dict[kind])
            state.size = min(max(state.size, self.minimum), self.maximum)
            self._kinds[kind] = state


def check_bounds(minimum: int, maximum: int | None) -> None:
    """Refuse bounds that leave no size between them; a `maximum` of `None` is not known yet.

    Raises:
        ValueError: names the arguments, their values and what works.
    """
    check_sizes(minimum=minimum, maximum=maximum)
    if maximum is not None and minimum > maximum:
        raise ValueError(
            f"`ParallelismPlanner({maximum=}, {minimum=})`: `minimum` must be at most "
            "`maximum`. Swap them, or leave `minimum` out."
        )


def check_sizes(**sizes: int | None) -> None:
    """Refuse what is no power of two; `None` is a size that is not known yet.

    Raises:
        ValueError: names the argument, its value and what works.
    """
    for name, n in sizes.items():
        if n is not None and (type(n) is not int or n < 1 or n & (n - 1)):
            raise ValueError(
                f"`ParallelismPlanner`: `{name}={n!r}`: must be a power of two, such as 1, 2, 4 "
                "or 8."
            )


def _mix(average: float, new: float) -> float:
    return average + SMOOTHING * (new - average)
