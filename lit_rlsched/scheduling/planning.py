"""Planning which slot decodes which completions when their lengths are known.

The offline stage of Infinite Sampling's scheduler (arXiv 2506.22950). Slots are identical machines,
completions are jobs, and a plan keeps the makespan (the step in which the last slot is done) small:
the problem P||Cmax. A plan has one queue of indices into `lengths` per slot, longest job first and
equal jobs in the order of `lengths`.

All functions take `lengths`, the decode steps of each job; the number of `slots`; and `loads`, the
decode steps for which each slot is still busy (default: 0). None is negative.
"""

import heapq
from collections.abc import Sequence

import numpy as np

# Limits of the work in `plan_makespan`: pairs of jobs tried for a swap (nanoseconds each), and
# loads in the states of the search (about 50 ns each).
_MAX_PAIRS = 8_000_000
_MAX_CELLS = 1_000_000

_STEP_CELLS = 500  # fixed cost of one step of the search, in loads
_ROUNDING = 1e-9  # a plan this close to the bound is optimal: bounds of floats are rounded down

Steps = Sequence[float] | np.ndarray


def makespan(queues: Sequence[Sequence[int]], lengths: Steps, loads: Steps | None = None) -> float:
    """Decode steps until the last of the plan's queues is done; an int if all inputs are ints."""
    jobs, busy = (steps.tolist() for steps in _arrays(lengths, len(queues), loads))
    return max(
        (sum((jobs[i] for i in queue), start) for queue, start in zip(queues, busy, strict=True)),
        default=0,
    )


def lower_bound(lengths: Steps, slots: int, loads: Steps | None = None) -> float:
    """Decode steps that no plan can beat; an int if all inputs are ints.

    The largest of three bounds: the longest job after the smallest load; the level to which the
    jobs would fill the slots if they could be cut up; and, for every k, the `k + 1` shortest of the
    `k * slots + 1` longest jobs and loads, since some slot has `k + 1` of these.
    """
    jobs, busy = _arrays(lengths, slots, loads)
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


def plan_makespan(
    lengths: Steps, slots: int, epsilon: float = 0.1, loads: Steps | None = None
) -> list[list[int]]:
    """Plan with a small makespan, never larger than longest first (LPT, Graham 1969).

    Start by giving the longest job to the slot that is free first: at most 4/3 - 1/(3 slots) times
    the shortest makespan, or 3/2 - 1/(2 slots) times with `loads` (Lee 1991). Swap jobs of the
    fullest slot with others while that helps. If `lower_bound` does not prove the result optimal,
    continue with the approximation scheme for a fixed number of slots (Sahni 1976; Horowitz and
    Sahni 1976): place jobs longest first; a state is the sorted loads of the slots; merge states
    that are equal up to `epsilon * lower_bound / (2 * n)`, and drop states no better than the plan
    found so far.

    The makespan is at most `1 + epsilon` times the shortest if it is at most that multiple of
    `lower_bound`, or if the search completes. The number of states grows exponentially with
    `slots`: beyond 20 jobs on 4 or more slots the search usually stops at its limit, and only the
    guarantee of longest first is left.
    """
    lower = lower_bound(lengths, slots, loads)
    jobs, busy = _arrays(lengths, slots, loads)
    order = np.argsort(-jobs, kind="stable")
    jobs = jobs[order]

    slot_of = _list_schedule(jobs, busy)
    plans = [_queues(slot_of, order, slots)]
    plans.append(_queues(_swap(jobs, slot_of, busy, lower), order, slots))
    best = min(makespan(plan, lengths, loads) for plan in plans)
    if best > lower * (1 + _ROUNDING):
        certain = best <= lower * (1 + epsilon)  # good enough: search only a little
        cells = _MAX_CELLS // 16 if certain else _MAX_CELLS
        grain = max(epsilon * lower / (2 * len(jobs)), best * 2**-50)
        found = _search(jobs, busy, best, grain, cells)
        if found is not None:
            plans.append(_queues(found, order, slots))
    return min(plans, key=lambda plan: makespan(plan, lengths, loads))


def _list_schedule(jobs: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """The slot of each job when each job in turn goes to the slot that is free first."""
    free = [(load, slot) for slot, load in enumerate(busy.tolist())]
    heapq.heapify(free)
    slot_of = np.empty(len(jobs), np.int64)
    for i, job in enumerate(jobs.tolist()):
        load, slot_of[i] = free[0]
        heapq.heapreplace(free, (load + job, free[0][1]))
    return slot_of


def _swap(jobs: np.ndarray, slot_of: np.ndarray, busy: np.ndarray, lower: float) -> np.ndarray:
    """Swap a job of the fullest slot where it lowers both slots the most, while that helps."""
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
    """The slot of each job in a plan below `best`; None if there is none or the limit is hit."""
    states = np.sort(busy)[None]
    history = []
    cells = 0
    for job in jobs:
        fits = states + job < best
        fits[:, 1:] &= states[:, 1:] != states[:, :-1]  # equal slots lead to the same state
        parent, rank = np.nonzero(fits)
        cells += parent.size * len(busy) + _STEP_CELLS
        if not parent.size or cells > max_cells:
            return None
        grown = states[parent]
        grown[np.arange(len(parent)), rank] += job
        grown.sort(axis=1)
        rounded = grown // grain
        order = np.lexsort(rounded.T)
        new = np.ones(len(order), bool)  # the first of each group of equal states
        new[1:] = (rounded[order[1:]] != rounded[order[:-1]]).any(axis=1)
        kept = order[new]
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


def _queues(slot_of: np.ndarray, order: np.ndarray, slots: int) -> list[list[int]]:
    queues: list[list[int]] = [[] for _ in range(slots)]
    for job, slot in zip(order.tolist(), slot_of.tolist(), strict=True):
        queues[slot].append(job)
    return queues


def _arrays(lengths: Steps, slots: int, loads: Steps | None) -> tuple[np.ndarray, np.ndarray]:
    """Jobs and loads as arrays of one dtype: int64, or float64 if any value is a float."""
    given = (lengths, [0] * slots if loads is None else loads)
    jobs, busy = (np.asarray(steps) if len(steps) else np.zeros(0, np.int64) for steps in given)
    dtype = np.result_type(jobs, busy)
    return jobs.astype(dtype), busy.astype(dtype)
