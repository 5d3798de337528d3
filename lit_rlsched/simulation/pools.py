"""Choose the number of slots for `SortedBatching` from the lengths of an earlier run."""

from collections.abc import Sequence
from itertools import islice
from typing import Literal

import numpy as np

from lit_rlsched.scheduling.planning import Steps
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.decoder import Engines
from lit_rlsched.simulation.rounds import SimulatedRounds
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.types import Sampling

Mode = Literal["on_policy", "partial"]
Lengths = Steps | Sequence[Sequence[float]]


def recommend_slots(
    lengths: Lengths,
    update: int,
    bubble_ratio: float = 0.05,
    mode: Mode = "on_policy",
    max_completion_length: int | None = None,
) -> int:
    """Number of slots with which a pool idles no more than `bubble_ratio`.

    Bisection finds a number that keeps to the target while one more slot does not. Each number that
    it tries simulates the whole pool, which takes 0.2 seconds for 4,000 completions. At most as
    many slots as completions are considered. See `docs/explanation/sorted_rl.md` for a number that
    is safe for any pool.
    """
    if not 0 <= bubble_ratio < 1:
        raise UsageError(f"`bubble_ratio={bubble_ratio}`: use 0 or more, and less than 1.")

    def keeps(slots: int) -> bool:
        ratio = pool_bubble_ratio(lengths, update, slots, mode, max_completion_length)
        return ratio <= bubble_ratio

    least, most = 1, max(1, np.size(lengths))  # a single slot never idles
    if keeps(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if keeps(middle) else (least, middle)
    return least


def pool_bubble_ratio(
    lengths: Lengths,
    update: int,
    slots: int,
    mode: Mode = "on_policy",
    max_completion_length: int | None = None,
) -> float:
    """Idle slot-steps over all slot-steps of a pool, with its last drain.

    Equation 4 of SortedRL (arXiv 2603.23414) with `slots` as Q and a decode step as the unit of
    time. A completion has the same length each time it is drawn. Slot-steps whose tokens are thrown
    away later do not count as idle.
    """
    for name, value in (("update", update), ("slots", slots)):
        if value < 1:
            raise UsageError(f"`{name}={value}`: use 1 or more.")
    rows = np.asarray(lengths)
    if not rows.size or rows.ndim > 2:
        raise UsageError(
            f"`lengths` has the shape {rows.shape}: give one per completion, or one row per group."
        )
    limit = max_completion_length or np.ceil(rows.max())
    if not (rows.min() >= 1 and rows.max() <= limit):
        raise UsageError(
            f"`lengths` has values from {rows.min()} to {rows.max()}: a completion has 1 token or "
            f"more, and no more than `{max_completion_length=}`."
        )
    groups = np.ceil(rows).astype(int).reshape(len(rows), -1).tolist()
    work = Workload(groups, [1] * len(groups), int(limit))
    rule = SortedRound(update, len(groups), len(groups[0]), "group", mode)
    visits = islice(work.visits(), len(groups))
    engines = Engines(slots=slots)
    rounds = SimulatedRounds(visits, work.length, engines, Sampling(work.limit), len(groups[0]))
    version = total = busy = 0
    while (drawn := rounds.draw(rule, version)) is not None:
        version += 1
        total += drawn.slot_steps
        busy += drawn.row_steps
    return (total - busy) / total
