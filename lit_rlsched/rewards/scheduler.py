"""Scoring of completions as they finish, outside the trainer's process."""

import math
import os
import selectors
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from lit_rlsched.processes import hide_environment, require_posix, worker_environment
from lit_rlsched.rewards.checks import (
    as_functions,
    check_columns,
    check_env_vars,
    check_memory_limit,
    check_names,
    check_seen_by_tools,
    environment_of,
    is_async,
    names_argument,
    offered_arguments,
    tokens_looked_for,
    unique_names,
    unwrap,
)
from lit_rlsched.rewards.jobs import (
    BadMessage,
    FailureCounts,
    Job,
    Result,
    ScoredJob,
    packed_row,
    scored,
)
from lit_rlsched.rewards.pool import WorkerPool
from lit_rlsched.rewards.worker_process import (
    WorkerProcess,
    kill_strays,
    machine_memory,
    warn_of_no_limit,
)
from lit_rlsched.settings import UsageError, check_ranges


class RewardScheduler:
    """Calls reward functions in separate processes, so that they cannot harm the run.

    If a function raises, hangs, crashes, takes too much memory or returns nonsense, the requested
    score is None, and the failure is logged and counted. Functions are called as TRL calls them,
    with lists of length one, so a score never depends on other completions that are scored at the
    same time.

    The scheduler does nothing between calls: `poll`, `turn` and `wait` collect scores, send work
    and kill overdue workers. Call one of them in every decode step.

    Args:
        reward_funcs: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`,
            sync or async; one or several, each a function or its import path. An attribute
            `warm_up` is called once in each worker before time-outs count. An attribute `env_vars`
            names environment variables, such as a key, that only this function may see: it is
            called in workers of its own.
        reward_weights: Weight of each function in the reward. None: 1 each.
        workers: Number of worker processes; the same number again for functions with `env_vars`.
        timeout: Seconds one call of one function may take before its process is killed.
        memory_limit: Memory that calls may take in a worker, such as `4GiB`, on top of what the
            loaded functions hold. A call that allocates more gets a MemoryError. A worker that
            holds more, child processes and shared memory included, is killed. None: half of the
            machine's memory, divided among the workers. Linux only.
        env_vars: Names of environment variables that all workers see, besides those that Python
            and its packages need (`docs/howto/rewards.md` lists them).
        environments: Whether completions have environments. Functions with an argument of this name
            are then called where those are, and `submit` gets their results.

    Example:
        >>> from lit_rlsched.rewards.functions import countdown_reward
        >>> with RewardScheduler([countdown_reward], timeout=10) as scheduler:
        ...     scheduler.names
        ['countdown_reward']
    """

    def __init__(
        self,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str],
        *,
        reward_weights: Sequence[float] | None = None,
        workers: int = 1,
        timeout: float = 30.0,
        memory_limit: str | int | None = None,
        env_vars: Sequence[str] = (),
        environments: bool = False,
    ) -> None:
        check_ranges("RewardScheduler", locals())
        reward_funcs = as_functions(reward_funcs)
        if reward_weights is not None and len(reward_weights) != len(reward_funcs):
            raise UsageError(
                f"`reward_weights={list(reward_weights)}` has {len(reward_weights)} entries, but "
                f"`reward_funcs` has {len(reward_funcs)}. Give one weight for each function."
            )
        self.names = unique_names(reward_funcs)
        self.weights = [float(w) for w in reward_weights or [1.0] * len(reward_funcs)]
        self.timeout = timeout
        """May be changed at any time; applies to jobs submitted afterwards."""
        self._functions = reward_funcs
        self._is_async = [is_async(function) for function in reward_funcs]
        self.offered = [offered_arguments(function) for function in reward_funcs]
        """Arguments besides TRL's that each function is called with."""
        self.num_workers = workers
        self.env_vars = check_env_vars(env_vars)
        """Names of environment variables that all workers see besides the usual ones."""
        self._memory_limit = check_memory_limit(memory_limit)
        self._pace = [0.0] * len(reward_funcs)
        """Recent seconds per call; 0 for coroutines, which do not wait for each other."""
        self._pools: list[WorkerPool] = []
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[Hashable, Job] = {}
        self._finished: list[Job] = []
        self._submitted = 0
        self._failures = FailureCounts(self.names, ["log_failure" in o for o in self.offered])
        self.of_environments = {
            index: function
            for index, function in enumerate(reward_funcs)
            if environments and names_argument(function, "environments")
        }
        """Functions by number that are called with the environment of a completion."""
        for index, function in self.of_environments.items():
            check_seen_by_tools(self.names[index], environment_of(function), self.env_vars)
        self._kill_at_exit = weakref.finalize(self, _kill_all, self._pools, os.getpid())

    @property
    def has_async(self) -> bool:
        """Whether a worker runs several calls at the same time, of coroutines."""
        return any(self._is_async)

    def asks_for(self, argument: str) -> bool:
        """Whether any function has an argument of this name."""
        return any(names_argument(function, argument) for function in self._functions)

    @property
    def pending(self) -> int:
        """Number of jobs submitted and not yet returned by `poll`."""
        return len(self._jobs)

    def check_rows(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Pass every row to the functions' attribute `check_row`.

        Args:
            rows: Name and columns of each row.

        Raises:
            UsageError: a function refuses a row.
        """
        checks = [getattr(unwrap(function), "check_row", None) for function in self._functions]
        for row, columns in rows if any(checks) else ():
            for name, check in zip(self.names, checks, strict=True):
                try:
                    if check is not None:
                        check(columns)
                except ValueError as error:
                    raise UsageError(f"`{name}` refuses the row `{row}`: {error}") from None

    def check_columns(self, rows: Sequence[Mapping[str, Any]] | Any, data: str) -> None:
        """Refuse columns that functions would not see, and functions that do not fit the columns.

        Args:
            rows: Rows of the data set, with all columns. An attribute `column_sets` (the number of
                the first row with each set of columns) saves looking at every row.
            data: Name of the data set's setting.
        """
        first_rows = getattr(rows, "column_sets", None)
        if first_rows is None:
            first_rows = {}
            for number, row in enumerate(rows):
                first_rows.setdefault(tuple(row), number)
        for columns, number in first_rows.items():
            self.check_row_columns(columns, f"row {number} of `{data}` (the first is 0)")

    def check_row_columns(self, columns: Iterable[Any], at: str) -> None:
        """Refuse what `check_columns` refuses, for the columns of one row.

        Args:
            columns: Names of the row's columns.
            at: Says where the row is, for the message.
        """
        names = list(map(str, columns))
        check_names(names, at)
        for index, function in enumerate(self._functions):
            more = ["environments"] if index in self.of_environments else []
            check_columns(function, self.names[index], [*names, *more], at)

    def tokens_looked_for(
        self, tokens: Sequence[str], template: str, prompts: Sequence[str]
    ) -> list[str]:
        """Return the special tokens that a function is likely to look for."""
        return tokens_looked_for(self._functions, tokens, template, prompts)

    def start(self) -> None:
        """Launch the workers and wait until all have imported the functions.

        Raises:
            UsageError: a function cannot be sent to another process.
            RuntimeError: a function cannot be loaded there; or on Windows.
        """
        if self._pools or len(self.of_environments) == len(self._functions):
            return
        require_posix("The reward workers")
        warn_of_no_limit(self._memory_limit)
        pickled = [self.pickled(index) for index in range(len(self._functions))]
        hide_environment()
        kinds = self._functions_by_environment()
        memory = self._memory_limit or machine_memory() // 2 // (self.num_workers * len(kinds))
        for variables, indices in kinds.items():
            setup = {
                "functions": {index: pickled[index] for index in indices},
                "is_async": self._is_async,
                "offered": self.offered,
                "memory_limit": memory,
            }
            environment = worker_environment(variables)
            self._pools.append(
                WorkerPool(setup, self.names, environment, self.num_workers, self._selector)
            )
        try:
            for pool in self._pools:
                pool.start()
            while not all(pool.ready for pool in self._pools):
                self.turn(1.0)
        except BaseException:
            self.close()
            raise

    def _functions_by_environment(self) -> dict[frozenset[str], list[int]]:
        """Group the functions by the environment variables that they may see."""
        common = worker_environment(self.env_vars)
        kinds: dict[frozenset[str], list[int]] = {}
        for index, function in enumerate(self._functions):
            if index in self.of_environments:
                continue
            own = {name for name in environment_of(function) if name in os.environ}
            kinds.setdefault(frozenset(own - common.keys() | set(self.env_vars)), []).append(index)
        return kinds

    @property
    def _workers(self) -> list[WorkerProcess]:
        return [worker for pool in self._pools for worker in pool.workers]

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
        given: Mapping[int, Result] | None = None,
    ) -> None:
        """Queue a completion for scoring; the next `poll` sends it.

        Args:
            job_id: Identifies the job in what `poll` returns.
            prompt: A string, or chat messages.
            completion: A string, or for chat messages a list of the assistant's messages and the
                replies of tools.
            completion_ids: Token ids of the completion.
            columns: Other columns of the row, and this completion's `finish_reasons`.
            timeout: Seconds for each call, instead of the scheduler's own time-out.
            trainer_state: Passed to the functions.
            given: Results of the functions of `of_environments`.

        Raises:
            UsageError: the job is still being scored, or the time-out is not a positive number.
        """
        if job_id in self._jobs:
            raise UsageError(f"job {job_id!r} is still being scored. Use another `job_id`.")
        if timeout is not None:
            check_ranges("RewardScheduler", {"timeout": timeout})
        self.start()
        job = self._jobs[job_id] = Job(
            key=self._submitted,
            id=job_id,
            payload=packed_row(prompt, completion, completion_ids, columns, trainer_state),
            timeout=timeout or self.timeout,
            results=[None] * len(self.names),
        )
        self._submitted += 1
        for index in self.of_environments:
            self._take(job, index, (given or {}).get(index, Result(0.0, None, None, {}, {})))
        for pool in self._pools:
            pool.queue.append(job)

    def poll(self) -> list[ScoredJob]:
        """Collect scores and return all jobs finished since the last call, in submission order."""
        self.turn(0.0)
        finished, self._finished = self._finished, []
        for job in finished:
            del self._jobs[job.id]
        return [scored(job) for job in sorted(finished, key=lambda job: job.key)]

    def turn(self, seconds: float = 0.0) -> None:
        """Send work, receive scores and kill overdue workers, but return nothing yet.

        Args:
            seconds: Maximum time to wait for a score.
        """
        self._feed()
        block = min([seconds, *(worker.time_left() for worker in self._workers)])
        while ready := self._selector.select(max(0.0, block)):
            block = 0.0
            for key, _ in ready:
                self._receive(*key.data)
        for pool in self._pools:
            for worker in list(pool.workers):
                if worker.time_left() <= 0:
                    self._replace(pool, worker, f"timeout: killed after {worker.limit:g} s")
        self._feed()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` has something to return.

        Args:
            timeout: Maximum number of seconds to wait.

        Returns:
            False if nothing has finished in time, or nothing is pending.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._jobs and not self._finished and (left := end - time.monotonic()) > 0:
            self.turn(min(left, 1.0))
        return bool(self._finished)

    def cancel(self, job_ids: Iterable[Hashable]) -> None:
        """Forget these jobs. A running call continues, and its score is ignored."""
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs.pop(job_id).cancelled = True
        for pool in self._pools:
            pool.drop_cancelled()
        self._finished = [job for job in self._finished if not job.cancelled]

    def counters(self) -> dict[str, int]:
        """Return the failures so far, as `rewards/<function>/<kind>`."""
        return self._failures.by_key()

    def close(self) -> None:
        """Kill the workers and forget all jobs. The next `submit` starts new workers."""
        for worker in self._workers:
            self._selector.unregister(worker.connection)
        _kill_all(self._pools, os.getpid())
        self._jobs.clear()
        self._finished.clear()

    def __enter__(self) -> "RewardScheduler":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pickled(self, index: int) -> bytes:
        """Return a function for another process.

        Raises:
            UsageError: it cannot be sent there.
        """
        try:
            return cloudpickle.dumps(self._functions[index])
        except Exception as error:
            raise UsageError(
                f"`reward_funcs[{index}]` ({self.names[index]}) cannot be sent to a reward worker: "
                f"{type(error).__name__}: {error}. Define it at the top level of a module, or open "
                "what it holds (locks, clients, models) inside the function."
            ) from error

    def _feed(self) -> None:
        for pool in self._pools:
            pool.feed(sum(self._pace[index] for index in pool.functions))

    def _receive(self, pool: WorkerPool, worker: WorkerProcess) -> None:
        was_ready = worker.ready
        try:
            score = worker.receive()
        except (EOFError, OSError):
            self._replace(pool, worker)
            return
        except BadMessage as error:
            self._replace(pool, worker, f"crashed: the worker sent {error}")
            return
        if score is not None:
            pool.scored()
            self._take(*score)
            failure = score[2].failure
            if failure is not None and failure.startswith("out_of_memory"):
                worker.begun = False  # its next call is not to blame
                self._replace(pool, worker)  # it may still hold the memory
        elif worker.ready and not was_ready:
            pool.loaded()

    def _take(self, job: Job, index: int, result: Result) -> None:
        if job.cancelled:
            return
        job.results[index] = result
        if not self._is_async[index]:
            taken = job.timeout if result.seconds is None else result.seconds
            self._pace[index] += 0.2 * (taken - self._pace[index])
        if result.failure is not None:
            self._failures.add(self.names[index], result.failure)
        if job.complete:
            self._finished.append(job)

    def _replace(self, pool: WorkerPool, worker: WorkerProcess, failure: str | None = None) -> None:
        for failed in pool.remove(worker, failure):
            self._take(*failed)
        pool.replace(worker)


def _kill_all(pools: list[WorkerPool], owner: int) -> None:
    """Kill all workers. Not a method, as it runs when the scheduler is garbage-collected."""
    if os.getpid() == owner:  # a forked child leaves its parent's workers alone
        workers = [worker for pool in pools for worker in pool.workers]
        for worker in workers:
            worker.kill()
        if workers:
            kill_strays(workers)
        pools.clear()
