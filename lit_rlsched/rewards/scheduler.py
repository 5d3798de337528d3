"""Scores completions as they finish, outside the trainer's process."""

import json
import logging
import math
import os
import pickle
import selectors
import time
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from lit_rlsched.rewards.jobs import Job, Result, ScoredJob, scored
from lit_rlsched.rewards.process import (
    STARTUP_TIMEOUT,
    WorkerProcess,
    kill_strays,
    machine_memory,
)
from lit_rlsched.rewards.signatures import (
    check_reward_function,
    is_async,
    names_failures,
    unique_names,
    unwrap,
)
from lit_rlsched.sizes import parse_bytes

logger = logging.getLogger(__name__)

FAILURE_KINDS = {
    "raised": "raised",
    "timeout": "timeouts",
    "crashed": "crashes",
    "out_of_memory": "out_of_memory",
    "bad_return": "bad_returns",
    "no_answer": "no_answers",
    "unparsed": "unparsed",
}
"""First word of a failure -> last part of its counter."""
JUDGES_ONLY = ("no_answer", "unparsed")
"""Counted for functions that say so themselves, with `log_failure`."""
MAX_BATCH = 32
"""Most completions sent to a worker at once."""
BATCH_SECONDS = 1.0
"""As many as it will have scored after this: those behind one that hangs wait for its time-out."""
MIN_MEMORY = 64 << 20
"""Bytes that a worker needs for what it is sent."""
MAX_FAILED_STARTS = 3
"""Replacement workers that may fail in a row before the run is stopped."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class RewardScheduler:
    """Calls reward functions in processes of their own, so that they cannot hurt the run.

    A function that raises, hangs, crashes, takes too much memory or returns nonsense costs the one
    score it was asked for: None, logged and counted. Functions are called as TRL calls them, with
    lists of length one: a score never depends on which other completions are scored at the time.

    Nothing happens between calls: `poll` (or `wait`) is what collects scores, hands out work and
    kills what is overdue. Call it every engine step.

    Args:
        reward_funcs: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`,
            sync or async. An attribute `warm_up` is called once in each worker before it counts.
        reward_weights: Weight of each function in the reward. None: 1 each.
        workers: Processes that score.
        timeout: Seconds one call of one function may take before its process is killed.
        memory_limit: Memory that calls may take in a worker, such as `4GiB`, beside what it holds
            once the functions are loaded. What asks for more gets a MemoryError; processes that it
            starts have the same limit each. None: half of the machine's, shared by the workers.
            Linux only.

    Example:
        >>> from lit_rlsched.rewards.functions import countdown_reward
        >>> with RewardScheduler([countdown_reward], timeout=10) as scheduler:
        ...     scheduler.names
        ['countdown_reward']
    """

    def __init__(
        self,
        reward_funcs: Sequence[Callable[..., Any]],
        *,
        reward_weights: Sequence[float] | None = None,
        workers: int = 1,
        timeout: float = 30.0,
        memory_limit: str | int | None = None,
    ) -> None:
        if not reward_funcs:
            raise ValueError("`reward_funcs` is empty. Give at least one reward function.")
        for index, function in enumerate(reward_funcs):
            check_reward_function(index, function)
        if reward_weights is not None and len(reward_weights) != len(reward_funcs):
            raise ValueError(
                f"`reward_weights={list(reward_weights)}` has {len(reward_weights)} entries, but "
                f"`reward_funcs` has {len(reward_funcs)}. Give one weight for each function."
            )
        if workers < 1:
            raise ValueError(f"`workers={workers}` must be at least 1.")
        check_timeout(timeout)
        self.names = unique_names(reward_funcs)
        self.weights = [float(w) for w in reward_weights or [1.0] * len(reward_funcs)]
        self.timeout = timeout
        """May be changed at any time; holds for what is submitted from then on."""
        self._functions = list(reward_funcs)
        self._is_async = [is_async(function) for function in reward_funcs]
        self._names_failures = [names_failures(function) for function in reward_funcs]
        self._num_workers = workers
        if memory_limit is None:
            memory_limit = machine_memory() // 2 // workers
        self._memory_limit = parse_bytes(memory_limit, "memory_limit")
        if self._memory_limit < MIN_MEMORY:
            raise ValueError(f"`memory_limit={memory_limit!r}`: use '64MiB' or more.")
        self._pace = [0.0] * len(reward_funcs)
        """Seconds a call has taken lately; 0 for coroutines, which do not wait for each other."""
        self._pickled: list[bytes] = []
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._keys: dict[Hashable, int] = {}
        self._jobs: dict[int, Job] = {}
        self._queue: deque[Job] = deque()
        self._finished: list[Job] = []
        self._submitted = 0
        self._failed_starts = 0
        self._failures: Counter[tuple[str, str]] = Counter()
        self._kill_at_exit = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet returned by `poll`."""
        return len(self._jobs)

    def check_rows(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Let functions with an attribute `check_row` look at every row, named, before they run.

        Raises:
            ValueError: a function refuses a row.
        """
        checks = [getattr(unwrap(function), "check_row", None) for function in self._functions]
        for uid, columns in rows if any(checks) else ():
            for name, check in zip(self.names, checks, strict=True):
                try:
                    if check is not None:
                        check(columns)
                except ValueError as error:
                    raise ValueError(f"`{name}` refuses the row `{uid}`: {error}") from None

    def start(self) -> None:
        """Launch the workers and import the functions there; returns when all can score."""
        if self._workers:
            return
        self._pickled = [self._pickle(index) for index in range(len(self._functions))]
        for _ in range(self._num_workers):
            self._launch()
        self._failed_starts = MAX_FAILED_STARTS  # no second try: the first failure is told
        try:
            while not all(worker.ready for worker in self._workers):
                self._turn(1.0)
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        job_id: Hashable,
        *,
        prompt: Any,
        completion: Any,
        completion_ids: Sequence[int],
        columns: Mapping[str, Any],
        timeout: float | None = None,
        trainer_state: Any = None,
    ) -> None:
        """Queue a completion for scoring; the next `poll` sends it.

        Args:
            job_id: Comes back with the scores.
            prompt: A string, or chat messages.
            completion: A string, or for chat messages a list of one assistant message.
            completion_ids: Its tokens.
            columns: The row's other columns, and `finish_reasons` (for this completion alone).
            timeout: Seconds for each call, instead of the scheduler's own.
            trainer_state: Handed to the functions as it is.
        """
        if job_id in self._keys:
            raise ValueError(f"job {job_id!r} is still being scored. Use another `job_id`.")
        if timeout is not None:
            check_timeout(timeout)
        self.start()
        row = {name: value for name, value in columns.items() if name not in _NOT_COLUMNS}
        row.update(
            prompts=prompt,
            completions=completion,
            completion_ids=array("q", completion_ids),
            trainer_state=trainer_state,
        )
        job = Job(
            key=self._submitted,
            id=job_id,
            payload=pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL),
            timeout=timeout or self.timeout,
            results=[None] * len(self.names),
        )
        self._submitted += 1
        self._keys[job_id] = job.key
        self._jobs[job.key] = job
        self._queue.append(job)

    def poll(self) -> list[ScoredJob]:
        """All jobs finished since the last call, in the order they were submitted."""
        self._turn(0.0)
        finished, self._finished = self._finished, []
        for job in finished:
            self._forget(job)
        return [scored(job) for job in sorted(finished, key=lambda job: job.key)]

    def turn(self) -> None:
        """Collect scores and hand out work, as `poll` does, and return nothing yet."""
        self._turn(0.0)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` has something to return; False if nothing came, or nothing can."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._jobs and not self._finished and (left := end - time.monotonic()) > 0:
            self._turn(min(left, 1.0))
        return bool(self._finished)

    def cancel(self, job_ids: Iterable[Hashable]) -> None:
        """Forget these jobs. A call that is running goes on, and nobody hears of it."""
        for job_id in job_ids:
            if job_id in self._keys:
                self._forget(self._jobs[self._keys[job_id]])
        self._queue = deque(job for job in self._queue if job.key in self._jobs)
        self._finished = [job for job in self._finished if job.key in self._jobs]

    def counters(self) -> dict[str, int]:
        """Failures since the scheduler was made, as `rewards/<function>/<kind>`."""
        return {
            f"rewards/{name}/{plural}": self._failures[name, kind]
            for name, judges in zip(self.names, self._names_failures, strict=True)
            for kind, plural in FAILURE_KINDS.items()
            if judges or kind not in JUDGES_ONLY
        }

    def close(self) -> None:
        """Kill the workers and forget all jobs. The next `submit` starts anew."""
        for worker in self._workers:
            self._selector.unregister(worker.connection)
            worker.kill()
        if self._workers:
            kill_strays(self._workers)
        self._workers.clear()
        self._keys.clear()
        self._jobs.clear()
        self._queue.clear()
        self._finished.clear()

    def __enter__(self) -> "RewardScheduler":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _pickle(self, index: int) -> bytes:
        try:
            return cloudpickle.dumps(self._functions[index])
        except Exception as error:
            raise ValueError(
                f"`reward_funcs[{index}]` ({self.names[index]}) cannot be sent to a reward worker: "
                f"{type(error).__name__}: {error}. Define it at the top level of a module, or open "
                "what it holds (locks, clients, models) inside the function."
            ) from error

    def _turn(self, seconds: float) -> None:
        """Send what waits, then receive for up to this long; kill what is overdue."""
        self._feed()
        block = min([seconds, *(worker.time_left() for worker in self._workers)])
        while ready := self._selector.select(max(0.0, block)):
            block = 0.0
            for key, _ in ready:
                self._receive(key.data)
        for worker in list(self._workers):
            if worker.time_left() <= 0:
                self._replace(worker, overdue=True)
        self._feed()

    def _feed(self) -> None:
        for worker in self._workers:
            if self._queue and worker.ready and not worker.busy:
                worker.assign(self._next_batch())

    def _next_batch(self) -> list[Job]:
        size = min(MAX_BATCH, math.ceil(len(self._queue) / len(self._workers)))
        size = min(size, math.ceil(BATCH_SECONDS / max(sum(self._pace), 1e-9)))
        batch = [self._queue.popleft()]
        while len(batch) < size and not (batch[0].alone or self._queue[0].alone):
            batch.append(self._queue.popleft())
        return batch

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            kind, *message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):  # ValueError: a function wrote to our pipe
            self._replace(worker, overdue=False)
            return
        if kind == "score":
            key, index, *result = message
            worker.reported(key, index, stamp=result[0])
            outcome = Result(*result[1:])
            self._take(key, index, outcome)
            if outcome.failure is not None and outcome.failure.startswith("out_of_memory"):
                worker.begun = False  # what comes next in it is not to blame
                self._replace(worker, overdue=False)  # it may still hold what was too much
        elif kind == "begun":
            worker.began(stamp=message[0])
        elif kind == "loading":
            worker.loading = message[0]
        elif kind == "unloadable":
            worker.start_error = message[1]
        else:
            worker.ready = True
            worker.deadline = math.inf
            self._failed_starts = 0

    def _take(self, key: int, index: int, result: Result) -> None:
        job = self._jobs.get(key)
        if job is None:  # cancelled
            return
        job.results[index] = result
        if not self._is_async[index]:
            taken = job.timeout if result.seconds is None else result.seconds
            self._pace[index] += 0.2 * (taken - self._pace[index])
        if result.failure is not None:
            self._count(self.names[index], result.failure)
        if job.complete:
            self._finished.append(job)

    def _count(self, name: str, failure: str) -> None:
        kind = failure.partition(":")[0]
        self._failures[name, kind] += 1
        count = self._failures[name, kind]
        if math.log10(count).is_integer():  # the 1st, 10th, 100th ...: a log, not a flood
            logger.warning(
                "reward function `%s` gave no score for a completion: %s [%s no. %d]",
                *(name, failure, FAILURE_KINDS[kind], count),
            )

    def _replace(self, worker: WorkerProcess, *, overdue: bool) -> None:
        """Find out whose fault the worker's end was, and go on with another one."""
        self._selector.unregister(worker.connection)
        self._workers.remove(worker)
        death = worker.kill()
        kill_strays([worker])
        if not worker.ready:
            self._start_failed(worker, overdue, death)
        elif not worker.at_fault():
            logger.warning("a reward worker %s; another one scores what it had not scored", death)
        failure = f"crashed: the worker {death}"
        if overdue:
            failure = f"timeout: killed after {worker.limit:g} s"
        for key, index in worker.at_fault():
            self._take(key, index, Result(None, None, failure, {}, {}))
        unfinished = [self._jobs[key] for key in worker.jobs if key in self._jobs]
        for job in reversed([job for job in unfinished if not job.complete]):
            # of coroutines that ran together, one hung or crashed: next time each is by itself
            job.alone = job.alone or (worker.begun and not worker.calls)
            self._queue.appendleft(job)
        self._launch()

    def _start_failed(self, worker: WorkerProcess, overdue: bool, death: str) -> None:
        self._failed_starts += 1
        reason = worker.start_error or (
            f"no end within {STARTUP_TIMEOUT:g} s" if overdue else f"the worker {death}"
        )
        name = self.names[worker.loading]
        logger.warning("reward function `%s` failed to load in a worker: %s", name, reason)
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(
                f"Reward function `{name}` cannot be loaded in a reward worker: {reason}. Reward "
                "functions run in processes of their own: they, and all they use, must be "
                "importable there."
            )

    def _launch(self) -> None:
        worker = WorkerProcess(self._pickled, self._is_async, self._memory_limit)
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _forget(self, job: Job) -> None:
        del self._keys[job.id]
        del self._jobs[job.key]


def check_timeout(timeout: float) -> None:
    if not 0 < timeout < math.inf:
        raise ValueError(f"`timeout={timeout}` must be a positive number of seconds.")


def _kill_all(workers: list[WorkerProcess], owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's workers alone
        for worker in workers:
            worker.kill()
        kill_strays(workers)
