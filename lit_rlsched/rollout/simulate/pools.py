"""Choose the number of slots for `SortedBatching` from the lengths of an earlier run."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np

from lit_rlsched.scheduling.admission import TURNS
from lit_rlsched.scheduling.planning import Steps, check_slots, check_steps
from lit_rlsched.settings import UsageError

Mode = Literal["on_policy", "partial"]
PoolOrder = Literal["fifo", "least_attained"]

_ROUNDING = 1e-9


def recommend_slots(
    lengths: Steps | Sequence[Sequence[float]],
    update: int,
    bubble_ratio: float = 0.05,
    mode: Mode = "on_policy",
    order: PoolOrder = "fifo",
    max_completion_length: int | None = None,
) -> int:
    """Number of slots with which a pool idles no more than `bubble_ratio`.

    In `partial` mode with `fifo` this is the largest such number: more slots never lengthen a pool,
    so if `n` slots are idle too much, we can skip every smaller number that would still be idle too
    much in the same number of steps. Otherwise more slots may also end later, and bisection finds a
    number that keeps to the target while one more slot does not. At most as many slots as
    completions are considered. See `docs/explanation/sorted_rl.md` for a number that is safe for
    any pool.

    Args:
        lengths: Tokens of each completion in the order of the pool, from a schedule that trains on
            all that it draws. Flat if single completions are trained on, `[P, G]` if groups are.
        update: Number of completions (if `lengths` is flat) or groups that end a round.
        bubble_ratio: Maximum share of idle slot-time.
        mode: See `SortedRound`.
        order: See `Admission`.
        max_completion_length: Maximum number of tokens per completion; `least_attained` needs it.

    Raises:
        UsageError: `bubble_ratio` is not in [0, 1), or see `pool_bubble_ratio`.
    """
    if not 0 <= bubble_ratio < 1:
        raise UsageError(f"`bubble_ratio={bubble_ratio}`: use 0 or more, and less than 1.")
    groups = _groups(lengths, update)
    turn = _turn(groups, order, max_completion_length)

    def idles(slots: int) -> float:
        return _bubble_ratio(groups, update, slots, mode, turn)

    most = sum(map(len, groups))
    if idles(most) <= bubble_ratio:
        return most
    if mode == "partial" and order == "fifo":
        while (now := idles(most)) > bubble_ratio:
            as_long = most * (1 - now) / (1 - bubble_ratio)  # slots that idle enough in these steps
            most = max(1, min(most - 1, math.floor(as_long * (1 + _ROUNDING))))
        return most
    least = 1  # a single slot never idles
    while most - least > 1:
        middle = (least + most) // 2
        if idles(middle) <= bubble_ratio:
            least = middle
        else:
            most = middle
    return least


def pool_bubble_ratio(
    lengths: Steps | Sequence[Sequence[float]],
    update: int,
    slots: int,
    mode: Mode = "on_policy",
    order: PoolOrder = "fifo",
    max_completion_length: int | None = None,
) -> float:
    """Idle slot-steps over all slot-steps of a pool, with its last drain.

    Equation 4 of SortedRL (arXiv 2603.23414) with `slots` as Q and a decode step as the unit of
    time, for the decisions of `SortedRound` and `Admission`. A completion has the same length each
    time it is drawn. Slot-steps whose tokens are thrown away later do not count as idle.

    Args:
        lengths: See `recommend_slots`.
        update: See `recommend_slots`.
        slots: Maximum number of completions that decode at once.
        mode: See `SortedRound`.
        order: See `Admission`.
        max_completion_length: See `recommend_slots`.

    Raises:
        UsageError: `update` or `slots` is less than 1; `lengths` is empty, has more than two
            dimensions, or a length is not a finite number of 1 or more; `order` is another one; or
            it is `least_attained`, and `max_completion_length` is missing or exceeded.
    """
    check_slots(slots)
    groups = _groups(lengths, update)
    turn = _turn(groups, order, max_completion_length)
    return _bubble_ratio(groups, update, slots, mode, turn)


@dataclass(slots=True)
class _Completion:
    length: float
    drawn: float = 0

    @property
    def lacks(self) -> bool:
        return self.drawn < self.length


def _bubble_ratio(
    groups: list[list[float]], update: int, slots: int, mode: Mode, turn: float
) -> float:
    steps: float = 0
    busy: float = 0
    pool = [[_Completion(length) for length in group] for group in groups]
    if mode == "partial" and turn == math.inf:  # what runs goes on: one queue without rounds
        jobs = [length for group in groups for length in group]
        ends = jobs[:slots]
        heapq.heapify(ends)
        for length in jobs[slots:]:
            heapq.heapreplace(ends, ends[0] + length)
        steps, busy, pool = max(ends), sum(jobs), []
    while pool:
        discards = mode == "on_policy" and len(pool) > update
        now, drawn = _round(pool, update, slots, math.inf if discards else turn)
        steps, busy = steps + now, busy + drawn
        pool = [group for group in pool if any(c.lacks for c in group)]
        if discards:
            for completion in (c for group in pool for c in group):
                completion.drawn = 0
    return (slots * steps - busy) / (slots * steps)


def _round(
    pool: list[list[_Completion]], update: int, slots: int, turn: float
) -> tuple[float, float]:
    """Decode until `update` groups are complete; return the steps and the busy slot-steps."""
    arrivals = count()
    lacks = [sum(c.lacks for c in group) for group in pool]
    begun = ((i, c) for i, group in enumerate(pool) for c in group if c.lacks)
    # the order of `Admission`: fewest tokens first, then by arrival
    waiting = [(c.drawn, next(arrivals), i, c) for i, c in begun]
    heapq.heapify(waiting)
    running: list[tuple[float, int, int, _Completion]] = []  # by the step of their end
    now: float = 0
    busy: float = 0
    done = 0
    while (running or waiting) and done < update:
        part = turn if len(waiting) > slots - len(running) else math.inf
        while waiting and len(running) < slots:
            drawn, _, i, c = heapq.heappop(waiting)
            c.drawn = min(drawn + part, c.length)  # at the end of its turn
            heapq.heappush(running, (now + c.drawn - drawn, next(arrivals), i, c))
        before, now = now, running[0][0]
        busy += (now - before) * len(running)
        while running and running[0][0] == now:
            _, _, i, c = heapq.heappop(running)
            if c.lacks:
                heapq.heappush(waiting, (c.drawn, next(arrivals), i, c))
            else:
                lacks[i] -= 1
                done += not lacks[i]
    for stop, _, _, c in running:
        c.drawn -= stop - now
    return now, busy


def _turn(groups: list[list[float]], order: PoolOrder, max_completion_length: int | None) -> float:
    """Tokens of a turn."""
    if order == "fifo":
        return math.inf
    if order != "least_attained":
        raise UsageError(f"`{order=}`: use 'fifo' or 'least_attained'.")
    if max_completion_length is None:
        raise UsageError(
            "`order='least_attained'` takes turns of a share of `max_completion_length`. Set it to "
            "that of the data module."
        )
    if (longest := max(map(max, groups))) > max_completion_length:
        raise UsageError(
            f"`lengths` has {longest}, which is more than `{max_completion_length=}`. Use "
            "the limit that they were drawn under."
        )
    return -(-max_completion_length // TURNS)


def _groups(lengths: Steps | Sequence[Sequence[float]], update: int) -> list[list[float]]:
    """The lengths of each group; flat lengths are groups of one completion."""
    if update < 1:
        raise UsageError(f"`update={update}`: use 1 or more.")
    rows = np.asarray(lengths)
    if not rows.size or rows.ndim > 2:
        raise UsageError(
            f"`lengths` has the shape {rows.shape}: give one per completion, or one row per group."
        )
    steps = check_steps("lengths", rows.reshape(-1))
    if (least := steps.min()) < 1:
        raise UsageError(f"`lengths` has {least}: a completion has 1 token or more.")
    return steps.reshape(len(rows), -1).tolist()
