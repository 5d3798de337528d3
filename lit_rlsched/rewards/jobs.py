"""One completion on its way through the reward functions, and what becomes of it."""

import json
import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

from lit_rlsched.rewards.failures import FAILURE_KINDS, kind_of


class BadMessage(Exception):
    """What came from a reward worker cannot be what `worker.py` sends."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one call of one function, as the worker sends it."""

    seconds: float | None
    score: float | None
    failure: str | None
    extra: dict[str, Any]
    metrics: dict[str, list[float]]

    @classmethod
    def received(cls, seconds: Any, score: Any, failure: Any, extra: Any, metrics: Any) -> "Result":
        """Check what a worker sent: reward functions run there, and may write to its pipe.

        Raises:
            BadMessage: a part is of another type, or the score is not finite.
        """
        texts = isinstance(failure, str | None) and isinstance(extra, dict)
        lists = isinstance(metrics, dict) and all(isinstance(v, list) for v in metrics.values())
        logged = lists and all(isinstance(x, float) for v in metrics.values() for x in v)
        known = failure is None or (texts and kind_of(failure) in FAILURE_KINDS)
        if not (texts and known and logged and _is_number(seconds) and _is_number(score)):
            raise BadMessage(f"a result of other types: {score!r:.80}")
        return cls(seconds, score, failure, extra, metrics)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value))


def parse_message(data: bytes) -> tuple[str, list[Any]]:
    """The kind of a worker's message, and what comes with it.

    Raises:
        BadMessage: it is no such message.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise BadMessage(f"no JSON: {data!r:.80}") from None
    if not isinstance(message, list) or not message:
        raise BadMessage(f"no list: {message!r:.80}")
    kind, *rest = message
    types = MESSAGES.get(kind if isinstance(kind, str) else "")
    if types is None or list(map(type, rest[: len(types)])) != types:
        raise BadMessage(f"an unknown message: {message!r:.80}")
    return str(kind), rest


MESSAGES: dict[str, list[type]] = {
    "loading": [int],
    "unloadable": [int, str],
    "ready": [],
    "begun": [float],
    "score": [int, int, float],
}
"""Each kind of message, with the types that it begins with."""


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

    def todo(self, functions: Collection[int]) -> list[int]:
        """Which of these functions it has no result of."""
        return [index for index in functions if self.results[index] is None]


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
