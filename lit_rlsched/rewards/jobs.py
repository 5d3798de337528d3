"""One completion on its way through the reward functions, and what becomes of it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one call of one function, as the worker sends it."""

    seconds: float | None
    score: float | None
    failure: str | None
    extra: dict[str, Any]
    metrics: dict[str, list[float]]


@dataclass(slots=True)
class Job:
    """One completion on its way through the functions."""

    key: int
    id: Hashable
    payload: bytes
    timeout: float
    results: list[Result | None]
    alone: bool = False
    """Not to be sent together with others."""

    @property
    def complete(self) -> bool:
        return None not in self.results


@dataclass(frozen=True, slots=True)
class ScoredJob:
    """What the reward functions said about one completion; every list is in their order."""

    job_id: Hashable
    scores: list[float | None]
    """None: the function returned None or NaN, or failed."""
    failures: list[str | None]
    """`raised: ...`, `timeout: ...`, or another of `FAILURE_KINDS`."""
    seconds: list[float | None]
    """What each call took. None: it never came to an end."""
    extra: dict[str, Any]
    """What the functions gave to `log_extra`, by column."""
    metrics: dict[str, list[float]]
    """What the functions gave to `log_metric`, by name."""


def scored(job: Job) -> ScoredJob:
    results = [result for result in job.results if result is not None]
    extra: dict[str, Any] = {}
    metrics: dict[str, list[float]] = {}
    for result in results:
        extra.update(result.extra)
        for name, values in result.metrics.items():
            metrics.setdefault(name, []).extend(values)
    return ScoredJob(
        job.id,
        [result.score for result in results],
        [result.failure for result in results],
        [result.seconds for result in results],
        extra,
        metrics,
    )
