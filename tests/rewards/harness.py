"""Runs a reward scheduler in tests."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.rewards import RewardScheduler, ScoredJob


def submit(scheduler: RewardScheduler, job_id: Any, completion: Any, **keywords: Any) -> None:
    columns = keywords.pop("columns", {})
    scheduler.submit(
        job_id,
        prompt="p",
        completion=completion,
        completion_ids=[1, 2],
        columns=columns,
        **keywords,
    )


def collect(scheduler: RewardScheduler, seconds: float = 20.0) -> dict[Any, ScoredJob]:
    end = time.monotonic() + seconds
    jobs: dict[Any, ScoredJob] = {}
    while scheduler.pending:
        assert time.monotonic() < end, f"{scheduler.pending} jobs never came back"
        scheduler.wait(1.0)
        for job in scheduler.poll():
            assert job.job_id not in jobs
            jobs[job.job_id] = job
    return jobs


def score(
    functions: Sequence[Callable], completions: Sequence[Any], **settings: Any
) -> tuple[dict[Any, ScoredJob], dict[str, int]]:
    with RewardScheduler(functions, **settings) as scheduler:
        for completion in completions:
            submit(scheduler, completion, completion)
        return collect(scheduler), scheduler.counters()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
