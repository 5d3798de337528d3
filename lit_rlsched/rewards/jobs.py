"""Completions on their way through the reward functions, and their workers."""

import math
import time
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lit_rlsched.workers.pool import BadMessage, Result, Worker

ASYNC_GRACE = 1.0
"""Seconds an event loop gets to time its coroutines out before the worker is killed."""


@dataclass(slots=True)
class Job:
    """One completion on its way through the functions."""

    key: int
    id: Hashable
    payload: bytes
    timeout: float
    results: list[Result | None]
    alone: bool = False
    """Whether it must be the only job in its batch."""
    cancelled: bool = False

    def todo(self, functions: Collection[int]) -> list[int]:
        """Return the `functions` that have not scored it."""
        return [index for index in functions if self.results[index] is None]


class RewardWorker(Worker):
    """A process of `workers/scores.py`.

    It runs the sync calls of a batch in order, so the first one without a score is the running one;
    then it runs all coroutines of the batch concurrently.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.jobs: dict[int, Job] = {}
        """The current batch, by key."""
        self.calls: deque[tuple[int, int]] = deque()
        """Sync calls without a score: key of the job and number of the function."""
        self.coroutines: set[tuple[int, int]] = set()
        self.begun = False
        """Whether it works on the batch. Before that, no call is to blame for its end."""
        self.limit = math.inf
        """Seconds that it may take until the next score."""

    @property
    def busy(self) -> bool:
        return bool(self.calls or self.coroutines)

    def assign(self, batch: Sequence[Job], functions: Mapping[int, bool]) -> None:
        """Send jobs, for functions by number of which some are async."""
        self.begun = False
        self.jobs = {job.key: job for job in batch}
        todo = [(job, job.todo(functions)) for job in batch]
        calls = [(job.key, index) for job, indices in todo for index in indices]
        self.calls = deque(call for call in calls if not functions[call[1]])
        self.coroutines = {call for call in calls if functions[call[1]]}
        self.send([(job.key, job.payload, job.timeout, indices) for job, indices in todo])
        self.goes_on(time.monotonic())

    def ended(self, call: tuple[int, int], stamp: float) -> None:
        """Note that a call has a score."""
        if self.begun and call in self.coroutines and not self.calls:
            self.coroutines.remove(call)
            if not self.busy:
                self.deadline = math.inf
        elif self.begun and self.calls and self.calls[0] == call:
            self.calls.popleft()
            self.goes_on(stamp)
        else:
            raise BadMessage("a score out of turn")

    def goes_on(self, start: float) -> None:
        """Set the deadline of the next call, which began at `start` on the common clock."""
        if not 0 <= start <= time.monotonic():
            raise BadMessage("an impossible time")
        if self.calls:
            self.limit = self.jobs[self.calls[0][0]].timeout
        elif self.coroutines:
            self.limit = max(self.jobs[key].timeout for key, _ in self.coroutines) + ASYNC_GRACE
        else:
            self.limit = math.inf
        self.deadline = start + self.limit

    def at_fault(self) -> list[tuple[int, int]]:
        """Return the calls that may have been running, if they belong to one completion."""
        if self.begun and self.calls:
            return [self.calls[0]]
        of_one = self.begun and len({key for key, _ in self.coroutines}) == 1
        return sorted(self.coroutines) if of_one else []


class ScoredJob(NamedTuple):
    """Results of one completion. Every list is in the order of the reward functions."""

    job_id: Hashable
    scores: list[float | None]
    """None where the function returned None or NaN, or failed."""
    failures: list[str | None]
    """Why a function gave no score, beginning with one of `FAILURE_KINDS`; None if it gave one."""
    seconds: list[float | None]
    """Duration of each call; None if it never ended."""
    extra: dict[str, Any]
    """Column -> value that the functions passed to `log_extra`."""
    metrics: dict[str, list[float]]
    """Name -> values that the functions passed to `log_metric`."""


def scored(job: Job) -> ScoredJob:
    """Return the results of a complete job."""
    results = [result for result in job.results if result is not None]
    seconds, scores, failures, extras, logged = map(list, zip(*results, strict=True))
    extra = {name: value for each in extras for name, value in each.items()}
    metrics: dict[str, list[float]] = {}
    for each in logged:
        for name, values in each.items():
            metrics.setdefault(name, []).extend(values)
    return ScoredJob(job.id, scores, failures, seconds, extra, metrics)
