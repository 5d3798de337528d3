"""Which slot decodes which completions when their lengths are known beforehand.

The offline stage of Infinite Sampling's scheduler (arXiv 2506.22950). Slots are identical
machines, completions are jobs, a job takes as many decode steps as the completion is long, and the
plan keeps the makespan small: the step in which the last slot is done. That is P||Cmax.
"""

import heapq
from collections.abc import Sequence

import numpy as np

# What `plan_makespan` may spend: pairs of jobs that are looked at for a swap (nanoseconds each),
# and loads in the states of the search (some 50 ns each).
_MAX_PAIRS = 8_000_000
_MAX_CELLS = 1_000_000

_STEP_CELLS = 500  # what a step of the search costs however few states there are, in cells
_ROUNDING = 1e-9  # this close to the bound is optimal, as bounds of floats are rounded down

Steps = Sequence[float] | np.ndarray


def makespan(queues: Sequence[Sequence[int]], lengths: Steps, loads: Steps | None = None) -> float:
    """Decode steps until the last queue is done; an int when lengths and loads are.

    Args:
        queues: One a slot, of indices into `lengths`.
        lengths: Decode steps of each job.
        loads: Decode steps that each slot is busy with before its queue begins. None: none.

    Raises:
        ValueError: a length or load is negative or not finite, or `loads` is not one a queue.
    """
    jobs, busy = (steps.tolist() for steps in _check(lengths, len(queues), loads))
    return max(
        (sum((jobs[i] for i in queue), start) for queue, start in zip(queues, busy, strict=True)),
        default=0,
    )


def lower_bound(lengths: Steps, slots: int, loads: Steps | None = None) -> float:
    """Decode steps that no plan can beat; an int when lengths and loads are.

    The largest of: the longest job after the smallest load; the level to which the jobs fill the
    slots if they can be cut up; and, as of the `k * slots + 1` longest jobs and loads some
    `k + 1` share a slot, the sum of the `k + 1` shortest of these, for every k.

    Args:
        lengths: Decode steps of each job.
        slots: Jobs that decode at once.
        loads: Decode steps that each slot is busy with already. None: none.

    Raises:
        ValueError: `slots` is less than 1, a length or load is negative or not finite, or `loads`
            is not one a slot.
    """
    check_slots(slots)
    jobs, busy = _check(lengths, slots, loads)
    pieces = np.sort(np.concatenate([jobs, busy]))[::-1]
    sums = np.concatenate([[0], np.cumsum(pieces)])
    k = np.arange((len(pieces) - 1) // slots + 1)
    crowded = (sums[k * slots + 1] - sums[k * slots - k]).max()
    filled = np.cumsum(np.sort(busy)) + jobs.sum()  # the j least busy slots and all jobs
    used = np.arange(1, slots + 1)
    if pieces.dtype.kind == "i":
        level, slack = (-(-filled // used)).min(), 0
    else:  # the sums are rounded: never claim more than a plan's own sum can reach
        level, slack = (filled / used).min(), sums[-1] * len(pieces) * np.finfo(float).eps
    longest = jobs.max(initial=0) + busy.min()
    return max(longest, pieces[0], crowded - slack, level - slack).item()


def longest_first(lengths: Steps, slots: int, loads: Steps | None = None) -> list[list[int]]:
    """The longest waiting job always goes to the slot that is free first (LPT, Graham 1969).

    At most 4/3 - 1/(3 slots) times the shortest makespan, or 3/2 - 1/(2 slots) times with `loads`
    (Lee 1991).

    Args:
        lengths: Decode steps of each job.
        slots: Jobs that decode at once.
        loads: Decode steps that each slot is busy with already. None: none.

    Returns:
        One queue of indices into `lengths` a slot, longest first and of equal ones the first first.

    Raises:
        ValueError: `slots` is less than 1, a length or load is negative or not finite, or `loads`
            is not one a slot.
    """
    check_slots(slots)
    jobs, busy = _check(lengths, slots, loads)
    order = np.argsort(-jobs, kind="stable")
    return _queues(_list_schedule(jobs[order], busy), order, slots)


def plan_makespan(
    lengths: Steps, slots: int, epsilon: float = 0.1, loads: Steps | None = None
) -> list[list[int]]:
    """Which slot runs which jobs, so that all are done early.

    Starts from `longest_first`, then swaps jobs of the fullest slot with others while that helps.
    What is not optimal by `lower_bound` then goes through the approximation scheme for a fixed
    number of slots (Sahni 1976; Horowitz and Sahni 1976): jobs are placed longest first, a state
    is the slots' sorted loads, states alike up to `epsilon * lower_bound / (2 * n)` are merged,
    and those no better than the plan at hand are dropped.

    The makespan is at most `1 + epsilon` times the shortest one if it is at most that multiple of
    `lower_bound` or the search came to its end. States grow exponentially with `slots`: beyond 20
    jobs on 4 or more slots the search mostly gives up, and the bound of `longest_first` holds,
    than which the plan is never worse.

    Args:
        lengths: Decode steps of each job.
        slots: Jobs that decode at once.
        epsilon: How much longer than the shortest makespan is good enough.
        loads: Decode steps that each slot is busy with already. None: none.

    Returns:
        One queue of indices into `lengths` a slot, longest first and of equal ones the first first.

    Raises:
        ValueError: `epsilon` is not positive, `slots` is less than 1, a length or load is negative
            or not finite, or `loads` is not one a slot.
    """
    if not epsilon > 0:
        raise ValueError(f"`epsilon={epsilon}`: use more than 0, such as 0.1 for 10 %.")
    lower = lower_bound(lengths, slots, loads)
    jobs, busy = _check(lengths, slots, loads)
    order = np.argsort(-jobs, kind="stable")
    jobs = jobs[order]

    slot_of = _list_schedule(jobs, busy)
    plans = [_queues(slot_of, order, slots)]
    plans.append(_queues(_swap(jobs, slot_of, busy, lower), order, slots))
    best = min(makespan(plan, lengths, loads) for plan in plans)
    if best > lower * (1 + _ROUNDING):
        certain = best <= lower * (1 + epsilon)  # good enough already: a quick try
        cells = _MAX_CELLS // 16 if certain else _MAX_CELLS
        grain = max(epsilon * lower / (2 * len(jobs)), best * 2**-50)
        found = _search(jobs, busy, best, grain, cells)
        if found is not None:
            plans.append(_queues(found, order, slots))
    return min(plans, key=lambda plan: makespan(plan, lengths, loads))


def _list_schedule(jobs: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """The slot of each job when it goes to the one that is free first."""
    free = [(load, slot) for slot, load in enumerate(busy.tolist())]
    heapq.heapify(free)
    slot_of = np.empty(len(jobs), np.int64)
    for i, job in enumerate(jobs.tolist()):
        load, slot_of[i] = free[0]
        heapq.heapreplace(free, (load + job, free[0][1]))
    return slot_of


def _swap(jobs: np.ndarray, slot_of: np.ndarray, busy: np.ndarray, lower: float) -> np.ndarray:
    """Swap a job of the fullest slot so that both slots end lowest, as long as that helps."""
    home = slot_of.copy()
    loads = busy.copy()
    np.add.at(loads, home, jobs)
    pairs = 0
    while loads.max() > lower * (1 + _ROUNDING):
        full = loads.argmax()
        mine = np.flatnonzero(home == full)
        pairs += mine.size * home.size
        if pairs > _MAX_PAIRS:
            break
        shift = jobs[mine, None] - jobs
        higher = np.maximum(loads[full] - shift, loads[home] + shift)
        give, take = divmod(int(higher.argmin()), home.size)
        if higher[give, take] >= loads[full]:
            break
        other = home[take]
        loads[full] -= shift[give, take]
        loads[other] += shift[give, take]
        home[mine[give]], home[take] = other, full
    return home


def _search(
    jobs: np.ndarray, busy: np.ndarray, best: float, grain: float, max_cells: int
) -> np.ndarray | None:
    """The slot of each job in a plan below `best`; None if there is none or it takes too long."""
    states = np.sort(busy)[None]
    history = []
    cells = 0
    for job in jobs:
        fits = states + job < best
        fits[:, 1:] &= states[:, 1:] != states[:, :-1]  # slots alike lead to the same state
        parent, rank = np.nonzero(fits)
        cells += parent.size * len(busy) + _STEP_CELLS
        if not parent.size or cells > max_cells:
            return None
        grown = states[parent]
        grown[np.arange(len(parent)), rank] += job
        grown.sort(axis=1)
        kept = _first_of_each(grown // grain)
        states = grown[kept]
        history.append((parent[kept], rank[kept]))

    state = states[:, -1].argmin()
    ranks = []
    for parent, rank in reversed(history):
        ranks.append(rank[state])
        state = parent[state]
    ranked = sorted((load, slot) for slot, load in enumerate(busy.tolist()))
    slot_of = np.empty(len(jobs), np.int64)
    for i, (job, place) in enumerate(zip(jobs.tolist(), reversed(ranks), strict=True)):
        load, slot_of[i] = ranked[place]
        ranked[place] = (load + job, ranked[place][1])
        ranked.sort()
    return slot_of


def _first_of_each(rows: np.ndarray) -> np.ndarray:
    """An index of every distinct row."""
    order = np.lexsort(rows.T)
    new = np.ones(len(order), bool)
    new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    return order[new]


def _queues(slot_of: np.ndarray, order: np.ndarray, slots: int) -> list[list[int]]:
    queues: list[list[int]] = [[] for _ in range(slots)]
    for job, slot in zip(order.tolist(), slot_of.tolist(), strict=True):
        queues[slot].append(job)
    return queues


def check_slots(slots: int) -> None:
    if slots < 1:
        raise ValueError(f"`slots={slots}`: use 1 or more.")


def _check(lengths: Steps, slots: int, loads: Steps | None) -> tuple[np.ndarray, np.ndarray]:
    """Jobs and loads as arrays of one dtype: int64, or float64 if any of them is a float."""
    jobs = check_steps("lengths", lengths)
    busy = check_steps("loads", [0] * slots if loads is None else loads)
    if len(busy) != slots:
        raise ValueError(
            f"`loads` has {len(busy)} values for {slots} slots: give one a slot, 0 for one that is "
            "free."
        )
    dtype = np.result_type(jobs, busy)
    return jobs.astype(dtype), busy.astype(dtype)


def check_steps(name: str, values: Steps) -> np.ndarray:
    steps = np.asarray(values)
    whole = not steps.size or steps.dtype.kind in "biu"
    steps = steps.astype(np.int64 if whole else np.float64)
    bad = np.flatnonzero(~(np.isfinite(steps) & (steps >= 0)))
    if bad.size:
        i = int(bad[0])
        raise ValueError(f"`{name}[{i}]={steps[i]}`: use a finite number of steps, 0 or more.")
    return steps
