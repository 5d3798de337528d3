"""Reward workers that run the same functions in the same environment, and what waits for them."""

import logging
import math
import selectors
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from lit_rlsched.rewards.jobs import Job, Result
from lit_rlsched.rewards.worker_process import STARTUP_TIMEOUT, WorkerProcess, kill_strays

logger = logging.getLogger(__name__)

MAX_BATCH = 32
"""Most completions sent to a worker at once."""
BATCH_SECONDS = 1.0
"""As many as it will have scored after this: those behind one that hangs wait for its time-out."""
MAX_FAILED_STARTS = 3
"""Workers that may fail to start in a row before the run is stopped."""
MAX_DEATHS = 20
"""Workers that may die in a row with nothing scored, though no function was running."""


class WorkerPool:
    """Workers of one kind.

    Args:
        functions: Pickled reward functions, by number.
        names: Of all functions.
        is_async: Of all functions.
        environment: Variables of the workers.
        size: How many workers.
        memory_limit: Bytes that calls may take in each.
        selector: Told of every worker's pipe.
    """

    def __init__(
        self,
        functions: Mapping[int, bytes],
        names: Sequence[str],
        is_async: Sequence[bool],
        environment: Mapping[str, str],
        size: int,
        memory_limit: int,
        selector: selectors.BaseSelector,
    ) -> None:
        self.functions = functions
        self.queue: deque[Job] = deque()
        self.workers: list[WorkerProcess] = []
        self._names = names
        self._is_async = is_async
        self._environment = environment
        self._size = size
        self._memory_limit = memory_limit
        self._selector = selector
        self._failed_starts: list[str] = []
        self._deaths: list[str] = []
        self._started = False

    def start(self) -> None:
        """Launch the workers."""
        for _ in range(self._size):
            self._launch()

    @property
    def ready(self) -> bool:
        """Whether all workers have loaded the functions."""
        return all(worker.ready for worker in self.workers)

    def loaded(self, worker: WorkerProcess) -> None:
        """A worker says that it can score."""
        worker.loaded()
        self._failed_starts.clear()
        self._started = self._started or self.ready

    def scored(self) -> None:
        """A worker has scored something: whatever ended others has not ended all."""
        self._deaths.clear()

    def feed(self, seconds: float) -> None:
        """Give work to the workers that have none.

        Args:
            seconds: What scoring one completion has taken lately.
        """
        for worker in self.workers:
            if self.queue and worker.ready and not worker.busy:
                worker.assign(self._next_batch(seconds))

    def drop(self, jobs: Mapping[int, Job]) -> None:
        """Forget what waits and is not among these."""
        self.queue = deque(job for job in self.queue if job.key in jobs)

    def _next_batch(self, seconds: float) -> list[Job]:
        size = min(MAX_BATCH, math.ceil(len(self.queue) / len(self.workers)))
        size = min(size, math.ceil(BATCH_SECONDS / max(seconds, 1e-9)))
        batch = [self.queue.popleft()]
        while len(batch) < size and not (batch[0].alone or self.queue[0].alone):
            batch.append(self.queue.popleft())
        return batch

    def replace(
        self, worker: WorkerProcess, failure: str | None, jobs: Mapping[int, Job]
    ) -> Iterator[tuple[int, int, Result]]:
        """Go on with another worker.

        Args:
            worker: Dead, or to be killed.
            failure: Why it is killed, as a failure of the calls that it runs; None: it has died.
            jobs: Those that are being scored, by key.

        Yields:
            The calls whose fault it was: key of the job, number of the function, result.

        Raises:
            RuntimeError: the workers before this one ended in the same way.
        """
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
        for key, index in at_fault:
            yield key, index, Result(None, None, failure or f"crashed: the worker {death}", {}, {})
        unfinished = [jobs[key] for key in worker.jobs if key in jobs]
        for job in reversed([job for job in unfinished if job.todo(self.functions)]):
            # of coroutines that ran together, one hung or crashed: next time each is by itself
            job.alone = job.alone or (worker.begun and not worker.calls)
            self.queue.appendleft(job)
        self._launch()

    def _died_idle(self, worker: WorkerProcess, death: str) -> None:
        logger.warning("a reward worker %s; another one scores what it had not scored", death)
        if worker.jobs:
            self._deaths.append(death)
        if len(self._deaths) >= MAX_DEATHS:
            raise RuntimeError(
                f"{len(self._deaths)} reward workers in a row ended before they had scored "
                f"anything: {told(self._deaths)}. No reward function was running in them: look for "
                "what ends processes on this machine (the out-of-memory killer, limits of the "
                "container or the job)."
            )

    def _start_failed(self, worker: WorkerProcess, failure: str | None, death: str) -> None:
        reason = worker.start_error or failure or f"the worker {death}"
        if failure is not None and failure.startswith("timeout"):
            reason = f"not loaded within {STARTUP_TIMEOUT:g} s"
        self._failed_starts.append(reason)
        name = self._names[worker.loading]
        logger.warning("reward function `%s` failed to load in a worker: %s", name, reason)
        raised = bool(worker.start_error or failure)  # would be again: the first time it is told
        if (raised and not self._started) or len(self._failed_starts) >= MAX_FAILED_STARTS:
            raise RuntimeError(
                f"Reward function `{name}` cannot be loaded in a reward worker: "
                f"{told(self._failed_starts)}. {start_hint(worker, failure)}"
            )

    def _launch(self) -> None:
        worker = WorkerProcess(
            self.functions, self._is_async, self._environment, self._memory_limit
        )
        self.workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, (self, worker))


def told(reasons: Sequence[str]) -> str:
    """Reasons, and how often each."""
    counted = Counter(reasons).items()
    return "; ".join(f"{reason} ({n} times)" if n > 1 else reason for reason, n in counted)


def start_hint(worker: WorkerProcess, failure: str | None) -> str:
    """What may be done where a worker did not start."""
    if worker.start_error:
        return (
            "Reward functions run in processes of their own: they, and all they use, must be "
            "importable there, and are given few environment variables (`reward_env_vars`)."
        )
    if failure is not None:
        return "Loading is importing the function, unpickling it and calling its `warm_up`."
    return (
        "Nothing was raised there: the process was ended. SIGKILL comes from the out-of-memory "
        "killer, from a limit of the container or the job, or from a person; an exit code or "
        "SIGSEGV from code that is imported or that `warm_up` calls."
    )
