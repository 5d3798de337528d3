"""Scoring of completions as they finish, outside the trainer's process."""

import itertools
import logging
import math
import os
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched import workers as package
from lit_rlsched.processes import worker_environment
from lit_rlsched.rewards.checks import (
    TAGS,
    as_functions,
    check_columns,
    check_env_vars,
    check_memory_limit,
    check_seen_by_tools,
    code_of,
    environment_of,
    offered_arguments,
    parameters_of,
    unique_names,
)
from lit_rlsched.rewards.jobs import Job, RewardWorker, ScoredJob, scored
from lit_rlsched.settings import UsageError, check_ranges
from lit_rlsched.workers.child import LOGGED_KINDS, is_async, unwrap
from lit_rlsched.workers.pool import (
    FAILURE_KINDS,
    BadMessage,
    Pool,
    Result,
    Workers,
    machine_memory,
    packed_row,
    pickled,
)

logger = logging.getLogger(__name__)

MAX_BATCH = 32
"""Maximum number of completions sent to a worker at once."""


class RewardScheduler(Workers[RewardWorker]):
    """Calls reward functions in separate processes, so that they cannot harm the run.

    If a function raises, hangs, crashes, takes too much memory or returns nonsense, the requested
    score is None, and the failure is logged and counted. Functions are called as TRL calls them,
    with lists of length one, so a score never depends on other completions that are scored at the
    same time.

    The scheduler does nothing between calls: `poll`, `serve` and `wait` collect scores, send work
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
            loaded functions hold. A call that allocates more gets a MemoryError. None: half of the
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

    kind = "reward"
    loads = "Reward functions"
    script = Path(*package.__path__) / "scores.py"
    make = RewardWorker

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
        super().__init__()
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
        self.has_async = any(self._is_async)
        """Whether a worker runs several calls at the same time, of coroutines."""
        self.offered = [offered_arguments(function) for function in reward_funcs]
        """Arguments besides TRL's that each function is called with."""
        self.num_workers = workers
        self.env_vars = check_env_vars(env_vars)
        """Names of environment variables that all workers see besides the usual ones."""
        self._memory_limit = check_memory_limit(memory_limit)
        self._jobs: dict[Hashable, Job] = {}
        self._numbers = itertools.count()
        self._failures: Counter[str] = Counter()
        self.of_environments = {
            index: function
            for index, function in enumerate(reward_funcs)
            if environments and "environments" in parameters_of(function)
        }
        """Functions by number that are called with the environment of a completion."""
        for index, function in self.of_environments.items():
            check_seen_by_tools(self.names[index], environment_of(function), self.env_vars)

    @property
    def pending(self) -> int:
        """Number of jobs submitted and not yet returned by `poll`."""
        return len(self._jobs)

    def check_rows(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Pass name and columns of every row to the functions' attribute `check_row`."""
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

        The attribute `column_sets` of the rows (the number of the first row with each set of
        columns) saves looking at every row. `data` is the name of the data set's setting.
        """
        first_rows = getattr(rows, "column_sets", None)
        if first_rows is None:
            first_rows = {}
            for number, row in enumerate(rows):
                first_rows.setdefault(tuple(row), number)
        for columns, number in first_rows.items():
            at = f"row {number} of `{data}` (the first is 0)"
            for index, function in enumerate(self._functions):
                more = ["environments"] if index in self.of_environments else []
                check_columns(function, self.names[index], [*map(str, columns), *more], at)

    def tokens_looked_for(self, tokens: Iterable[str]) -> list[str]:
        """Return the special tokens that a function is likely to look for."""
        codes = [code_of(function) for function in self._functions]
        return [t for t in tokens if TAGS.search(t) or any(t in code for code in codes)]

    def start(self) -> None:
        """Launch the workers and wait until all have imported the functions.

        Raises:
            UsageError: a function cannot be sent to another process.
            RuntimeError: a function cannot be loaded there; or on Windows.
        """
        if self._pools or len(self.of_environments) == len(self._functions):
            return
        if self._memory_limit is not None and sys.platform != "linux":
            warnings.warn(
                f"`reward_memory_limit={self._memory_limit >> 20}MiB` has no effect: memory of "
                f"reward workers is limited on Linux only, and this is `{sys.platform}`. A "
                "function may take all memory of the machine.",
                stacklevel=2,
            )
        common = worker_environment(self.env_vars)
        kinds: dict[frozenset[str], list[int]] = {}
        """Functions by the environment variables that they may see."""
        for index, function in enumerate(self._functions):
            if index not in self.of_environments:
                own = {name for name in environment_of(function) if name in os.environ}
                seen = frozenset(own - common.keys() | set(self.env_vars))
                kinds.setdefault(seen, []).append(index)
        memory = self._memory_limit or machine_memory() // 2 // (self.num_workers * len(kinds))
        shared = {"is_async": self._is_async, "offered": self.offered, "memory_limit": memory}
        pools: list[Pool[RewardWorker]] = []
        for variables, indices in kinds.items():
            setup = {"loads": [self.loaded(index) for index in indices], **shared}
            pools.append(Pool(setup, worker_environment(variables), self.num_workers))
        self._begin(*pools)

    def loaded(self, index: int) -> tuple[str, int, bytes]:
        """Return what a worker loads for a function: its name in messages, number and pickle."""
        name = self.names[index]
        sent = pickled(f"`reward_funcs[{index}]` ({name})", self._functions[index])
        return f"Reward function `{name}`", index, sent

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
        payload = packed_row(prompt, completion, completion_ids, columns, trainer_state)
        results: list[Result | None] = [None] * len(self.names)
        job = Job(next(self._numbers), job_id, payload, timeout or self.timeout, results)
        self._jobs[job_id] = job
        for index in self.of_environments:
            self._take(job, index, (given or {}).get(index, Result(0.0, None, None, {}, {})))
        for pool in self._pools:
            pool.queue.append(job)

    def poll(self) -> list[ScoredJob]:
        """Collect scores and return all jobs finished since the last call, in submission order."""
        self.serve(0.0)
        finished, self._came = self._came, []
        for job in finished:
            del self._jobs[job.id]
        return [scored(job) for job in sorted(finished, key=lambda job: job.key)]

    def cancel(self, job_ids: Iterable[Hashable]) -> None:
        """Forget these jobs. A running call continues, and its score is ignored."""
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs.pop(job_id).cancelled = True
        for pool in self._pools:
            pool.queue = deque(job for job in pool.queue if not job.cancelled)
        self._came = [job for job in self._came if not job.cancelled]

    def counters(self) -> dict[str, int]:
        """Return the failures so far, as `rewards/<function>/<kind>`."""
        return {
            key: self._failures[key]
            for name, offered in zip(self.names, self.offered, strict=True)
            for kind, plural in FAILURE_KINDS.items()
            for key in [f"rewards/{name}/{plural}"]
            if kind not in LOGGED_KINDS or "log_failure" in offered
        }

    def close(self) -> None:
        """Kill the workers and forget all jobs. The next `submit` starts new workers."""
        self._end_all()
        self._jobs.clear()
        self._came.clear()

    def __enter__(self) -> "RewardScheduler":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _feed(self) -> None:
        """Send batches to idle workers."""
        for pool in self._pools:
            if not pool.queue:
                continue
            functions = {index: self._is_async[index] for _, index, _ in pool.setup["loads"]}
            for worker in pool.workers:
                if pool.queue and worker.ready and not worker.busy:
                    size = min(MAX_BATCH, math.ceil(len(pool.queue) / len(pool.workers)))
                    batch = [pool.queue.popleft()]
                    while len(batch) < size and not (batch[0].alone or pool.queue[0].alone):
                        batch.append(pool.queue.popleft())
                    worker.assign(batch, functions)

    def _received(self, worker: RewardWorker, kind: str, fields: list[Any]) -> None:
        """Use the score of a call, or note that a batch has begun."""
        if kind == "score":
            key, index, stamp, *rest = fields
            result = Result.received(*rest)
            worker.ended((key, index), stamp)
            worker.pool.deaths.clear()
            self._take(worker.jobs[key], index, result)
            if result.failure is not None and result.failure.startswith("out_of_memory"):
                worker.begun = False  # its next call is not to blame
                self._replace(worker)  # it may still hold the memory
        elif kind == "begun" and worker.busy and not worker.begun:
            worker.begun = True
            worker.goes_on(fields[0])
        else:
            raise BadMessage(f"`{kind}` out of turn")

    def _overdue(self, worker: RewardWorker) -> None:
        """Kill a worker whose call takes too long."""
        self._replace(worker, f"timeout: killed after {worker.limit:g} s")

    def _settle(
        self, worker: RewardWorker, to_blame: Mapping[tuple[int, int], str] | None, why: str
    ) -> bool:
        """Fail the calls to blame for a worker's end, and queue the others again."""
        if to_blame is None:
            to_blame = dict.fromkeys(worker.at_fault(), why)
        for (key, index), failure in to_blame.items():
            self._take(worker.jobs[key], index, Result(None, None, failure, {}, {}))
        functions = [index for _, index, _ in worker.pool.setup["loads"]]
        for job in reversed(worker.jobs.values()):
            if not job.cancelled and job.todo(functions):
                # one of several coroutines hung or crashed: next time each runs alone
                job.alone = job.alone or (worker.begun and not worker.calls)
                worker.pool.queue.appendleft(job)
        return bool(to_blame)

    def _take(self, job: Job, index: int, result: Result) -> None:
        """Keep the result of a call, unless its job was cancelled."""
        if job.cancelled:
            return
        job.results[index] = result
        if result.failure is not None:
            name, plural = self.names[index], FAILURE_KINDS[result.failure.partition(":")[0]]
            self._failures[f"rewards/{name}/{plural}"] += 1
            count = self._failures[f"rewards/{name}/{plural}"]
            if math.log10(count).is_integer():  # the 1st, 10th, 100th and so on
                logger.warning(
                    "reward function `%s` gave no score for a completion: %s [%s no. %d]",
                    *(name, result.failure, plural, count),
                )
        if None not in job.results:
            self._came.append(job)
