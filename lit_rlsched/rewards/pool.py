"""Reward workers that run the same functions in the same environment, and their queue."""

import logging
import math
import selectors
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlsched.rewards.jobs import Job, Result
from lit_rlsched.rewards.worker_process import STARTUP_TIMEOUT, WorkerProcess, kill_strays
from lit_rlsched.settings import RunFailed

logger = logging.getLogger(__name__)

MAX_BATCH = 32
"""Maximum number of completions sent to a worker at once."""
BATCH_SECONDS = 1.0
"""Target duration of a batch: completions behind a call that hangs wait for its time-out."""
MAX_FAILED_STARTS = 3
"""Number of workers in a row that may fail to start before the run stops."""
MAX_DEATHS = 20
"""Number of workers in a row that may die without a score, and without a running function."""


class WorkerPool:
    """Pool of workers."""

    def __init__(
        self,
        setup: Mapping[str, Any],
        names: Sequence[str],
        environment: Mapping[str, str],
        size: int,
        selector: selectors.BaseSelector,
    ) -> None:
        self.functions = setup["functions"]
        self.queue: deque[Job] = deque()
        self.workers: list[WorkerProcess] = []
        self._setup = setup
        self._names = names
        self._environment = environment
        self._size = size
        self._selector = selector
        self._started = False
        """Whether all workers have been ready at some time."""
        self._failed_starts: list[str] = []
        self._deaths: list[str] = []

    def start(self) -> None:
        for _ in range(self._size):
            self._launch()

    @property
    def ready(self) -> bool:
        """Whether all workers have loaded the functions."""
        return all(worker.ready for worker in self.workers)

    def loaded(self) -> None:
        """Note that a worker has become ready."""
        self._failed_starts.clear()
        self._started = self._started or self.ready

    def scored(self) -> None:
        """Note that a worker has scored something."""
        self._deaths.clear()

    def feed(self, seconds: float) -> None:
        """Send work to idle workers."""
        for worker in self.workers:
            if self.queue and worker.ready and not worker.busy:
                worker.assign(self._next_batch(seconds))

    def drop_cancelled(self) -> None:
        self.queue = deque(job for job in self.queue if not job.cancelled)

    def _next_batch(self, seconds: float) -> list[Job]:
        size = min(MAX_BATCH, math.ceil(len(self.queue) / len(self.workers)))
        size = min(size, math.ceil(BATCH_SECONDS / max(seconds, 1e-9)))
        batch = [self.queue.popleft()]
        while len(batch) < size and not (batch[0].alone or self.queue[0].alone):
            batch.append(self.queue.popleft())
        return batch

    def remove(self, worker: WorkerProcess, failure: str | None) -> list[tuple[Job, int, Result]]:
        """Kill a worker; return its failed calls: job, number of the function, result."""
        self._selector.unregister(worker.connection)
        self.workers.remove(worker)
        death = worker.kill()
        failure = worker.too_much or failure
        kill_strays([worker])
        at_fault = worker.at_fault()
        if not worker.ready:
            self._start_failed(worker, failure, death)
        elif not at_fault:
            self._died_idle(worker, failure or death)
        result = Result(None, None, failure or f"crashed: the worker {death}", {}, {})
        return [(worker.jobs[key], index, result) for key, index in at_fault]

    def replace(self, worker: WorkerProcess) -> None:
        """Launch another worker for a removed one and queue its unfinished jobs first."""
        for job in reversed(worker.jobs.values()):
            if not job.cancelled and job.todo(self.functions):
                # one of several coroutines hung or crashed: next time each runs alone
                job.alone = job.alone or (worker.begun and not worker.calls)
                self.queue.appendleft(job)
        self._launch()

    def _died_idle(self, worker: WorkerProcess, death: str) -> None:
        logger.warning("a reward worker %s; another one scores its unscored completions", death)
        if worker.jobs:
            self._deaths.append(death)
        if len(self._deaths) >= MAX_DEATHS:
            raise RunFailed(
                f"{len(self._deaths)} reward workers in a row ended before they had scored "
                f"anything: {_counted(self._deaths)}. No reward function was running in them: look "
                "for what ends processes on this machine (the out-of-memory killer, limits of the "
                "container or the job)."
            )

    def _start_failed(self, worker: WorkerProcess, failure: str | None, death: str) -> None:
        reason = worker.start_error or failure or f"the worker {death}"
        if failure is not None and failure.startswith("timeout"):
            reason = f"not loaded within {STARTUP_TIMEOUT:g} s"
        self._failed_starts.append(reason)
        name = self._names[worker.loading]
        logger.warning("reward function `%s` failed to load in a worker: %s", name, reason)
        # an error while loading would come again; a process that was killed may start next time
        raised = bool(worker.start_error or failure)
        if (raised and not self._started) or len(self._failed_starts) >= MAX_FAILED_STARTS:
            raise RunFailed(
                f"Reward function `{name}` cannot be loaded in a reward worker: "
                f"{_counted(self._failed_starts)}. {_start_hint(worker, failure)}"
            )

    def _launch(self) -> None:
        worker = WorkerProcess(self._setup, self._environment)
        self.workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, (self, worker))


def _counted(reasons: Sequence[str]) -> str:
    counted = Counter(reasons).items()
    return "; ".join(f"{reason} ({n} times)" if n > 1 else reason for reason, n in counted)


def _start_hint(worker: WorkerProcess, failure: str | None) -> str:
    if worker.start_error:
        return (
            "Reward functions run in separate processes: they, and all they use, must be "
            "importable there, and they see few environment variables (`reward_env_vars`)."
        )
    if failure is not None:
        return "Loading is importing the function, unpickling it and calling its `warm_up`."
    return (
        "Nothing was raised there: the process was ended. SIGKILL comes from the out-of-memory "
        "killer, from a limit of the container or the job, or from a person; an exit code or "
        "SIGSEGV comes from code that is imported or that `warm_up` calls."
    )
