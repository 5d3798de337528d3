"""Scores completions as they finish, outside the trainer's process."""

import math
import os
import pickle
import selectors
import time
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle

from lit_rlsched._environment import hide_environment, worker_environment
from lit_rlsched.platforms import require_posix
from lit_rlsched.rewards.cgroup import remove_leftovers
from lit_rlsched.rewards.columns import check_columns
from lit_rlsched.rewards.failures import FailureCounts
from lit_rlsched.rewards.jobs import (
    BadMessage,
    Job,
    Result,
    ScoredJob,
    parse_message,
    scored,
)
from lit_rlsched.rewards.memory import MemoryWatch, machine_memory, warn_of_no_limit
from lit_rlsched.rewards.pool import WorkerPool
from lit_rlsched.rewards.settings import check_env_vars, check_memory_limit, check_timeout
from lit_rlsched.rewards.signatures import (
    check_reward_function,
    environment_of,
    is_async,
    names_failures,
    unique_names,
    unwrap,
)
from lit_rlsched.rewards.worker_process import WorkerProcess, kill_strays
from lit_rlsched.settings import check_finite

MAX_MESSAGE = 64 << 20
"""Bytes that a worker may say at once."""
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
            An attribute `env_vars` names environment variables that it needs and the others must
            not see, such as a key: it is then called in workers of its own.
        reward_weights: Weight of each function in the reward. None: 1 each.
        workers: Processes that score; as many again for functions with an `env_vars` of their own.
        timeout: Seconds one call of one function may take before its process is killed.
        memory_limit: Memory that calls may take in a worker, such as `4GiB`, beside what it holds
            once the functions are loaded. What asks for more gets a MemoryError; a worker that
            with all it started holds more, shared memory included, is ended. None: half of the
            machine's, shared by the workers. Linux only.
        env_vars: Names of environment variables that all workers are given, besides the few that
            Python and its packages need (`docs/rewards.md` lists them).

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
        env_vars: Sequence[str] = (),
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
        check_finite({"reward_weights": reward_weights})
        if workers < 1:
            raise ValueError(f"`workers={workers}` must be at least 1.")
        check_timeout(timeout)
        self.names = unique_names(reward_funcs)
        self.weights = [float(w) for w in reward_weights or [1.0] * len(reward_funcs)]
        self.timeout = timeout
        """May be changed at any time; holds for what is submitted from then on."""
        self._functions = list(reward_funcs)
        self._is_async = [is_async(function) for function in reward_funcs]
        self._num_workers = workers
        self._env_vars = check_env_vars(env_vars)
        self._memory_limit = check_memory_limit(memory_limit)
        self._pace = [0.0] * len(reward_funcs)
        """Seconds a call has taken lately; 0 for coroutines, which do not wait for each other."""
        self._pools: list[WorkerPool] = []
        self._watch: MemoryWatch | None = None
        self._selector = selectors.DefaultSelector()
        self._keys: dict[Hashable, int] = {}
        self._jobs: dict[int, Job] = {}
        self._finished: list[Job] = []
        self._submitted = 0
        says_why = [names_failures(function) for function in reward_funcs]
        self._failures = FailureCounts(self.names, says_why)
        self._kill_at_exit = weakref.finalize(self, _kill_all, self._pools, os.getpid())

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

    def check_columns(self, rows: Sequence[Mapping[str, Any]], data: str) -> None:
        """Refuse functions that cannot be called for these rows.

        Args:
            rows: Of the data set, with all columns.
            data: What it is called.

        Raises:
            ValueError: names function, argument and columns.
        """
        for name, function in zip(self.names, self._functions, strict=True):
            check_columns(function, name, rows, data)

    def start(self) -> None:
        """Launch the workers and import the functions there; returns when all can score.

        Raises:
            ValueError: a function cannot be sent to another process.
            RuntimeError: a function cannot be loaded there; or on Windows.
        """
        if self._pools:
            return
        require_posix("The reward workers")
        warn_of_no_limit(self._memory_limit)
        pickled = [self._pickle(index) for index in range(len(self._functions))]
        hide_environment()
        kinds = self._kinds()
        memory = self._memory_limit or machine_memory() // 2 // (self._num_workers * len(kinds))
        for variables, indices in kinds.items():
            self._pools.append(
                WorkerPool(
                    {index: pickled[index] for index in indices},
                    self.names,
                    self._is_async,
                    worker_environment(variables),
                    self._num_workers,
                    memory,
                    self._selector,
                )
            )
        remove_leftovers()
        self._watch = MemoryWatch(partial(_workers_of, self._pools))
        try:
            for pool in self._pools:
                pool.start()
            while not all(pool.ready for pool in self._pools):
                self._turn(1.0)
        except BaseException:
            self.close()
            raise

    def _kinds(self) -> dict[frozenset[str], list[int]]:
        """Which functions share workers: those that are given the same variables."""
        common = worker_environment(self._env_vars)
        kinds: dict[frozenset[str], list[int]] = {}
        for index, function in enumerate(self._functions):
            own = {name for name in environment_of(function) if name in os.environ}
            kinds.setdefault(frozenset(own - common.keys() | set(self._env_vars)), []).append(index)
        return kinds

    @property
    def _workers(self) -> list[WorkerProcess]:
        return _workers_of(self._pools) or []

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
        for pool in self._pools:
            pool.queue.append(job)

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
        for pool in self._pools:
            pool.drop(self._jobs)
        self._finished = [job for job in self._finished if job.key in self._jobs]

    def counters(self) -> dict[str, int]:
        """Failures since the scheduler was made, as `rewards/<function>/<kind>`."""
        return self._failures.by_counter()

    def close(self) -> None:
        """Kill the workers and forget all jobs. The next `submit` starts anew."""
        for worker in self._workers:
            self._selector.unregister(worker.connection)
        if self._watch is not None:
            self._watch.stop()
        _kill_all(self._pools, os.getpid())
        self._keys.clear()
        self._jobs.clear()
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
                self._receive(*key.data)
        for pool in self._pools:
            for worker in list(pool.workers):
                if worker.time_left() <= 0:
                    self._replace(pool, worker, f"timeout: killed after {worker.limit:g} s")
        self._feed()

    def _feed(self) -> None:
        for pool in self._pools:
            pool.feed(sum(self._pace[index] for index in pool.functions))

    def _receive(self, pool: WorkerPool, worker: WorkerProcess) -> None:
        try:
            self._heard(pool, worker, *parse_message(worker.connection.recv_bytes(MAX_MESSAGE)))
        except (EOFError, OSError):
            self._replace(pool, worker)
        except BadMessage as error:  # a function wrote to our pipe
            self._replace(pool, worker, f"crashed: the worker sent {error}")

    def _heard(self, pool: WorkerPool, worker: WorkerProcess, kind: str, rest: list[Any]) -> None:
        if kind == "score":
            key, index, stamp, *result = rest
            try:
                outcome = Result.received(*result)
            except TypeError:
                raise BadMessage("a score of another length") from None
            worker.reported(key, index, stamp)
            pool.scored()
            self._take(key, index, outcome)
            if outcome.failure is not None and outcome.failure.startswith("out_of_memory"):
                worker.begun = False  # what comes next in it is not to blame
                self._replace(pool, worker)  # it may still hold what was too much
        elif kind == "begun":
            worker.began(rest[0])
        elif kind == "ready":
            pool.loaded(worker)
        else:
            worker.loads(*rest)

    def _take(self, key: int, index: int, result: Result) -> None:
        job = self._jobs.get(key)
        if job is None:  # cancelled
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
        for key, index, result in pool.replace(worker, failure, self._jobs):
            self._take(key, index, result)

    def _forget(self, job: Job) -> None:
        del self._keys[job.id]
        del self._jobs[job.key]


def _kill_all(pools: list[WorkerPool], owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's workers alone
        if workers := _workers_of(pools):
            for worker in workers:
                worker.kill()
            kill_strays(workers)
        pools.clear()


def _workers_of(pools: list[WorkerPool]) -> list[WorkerProcess] | None:
    """All of them; None once they are killed. Not a method: a thread must not keep us alive."""
    return [worker for pool in list(pools) for worker in list(pool.workers)] if pools else None
