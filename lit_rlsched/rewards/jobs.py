"""One completion on its way through the reward functions, and what becomes of it."""

import json
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from lit_rlsched.rewards.failures import FAILURE_KINDS, kind_of


class BadMessage(Exception):
    """What came from a reward worker cannot be what `reward_worker.py` sends."""


class Result(NamedTuple):
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
        if (  # `type`, as all comes from JSON; one expression, as this is done for each score
            (score is None or (type(score) is float and isfinite(score)))
            and (seconds is None or (type(seconds) is float and isfinite(seconds)))
            and (failure is None or (type(failure) is str and kind_of(failure) in FAILURE_KINDS))
            and type(extra) is type(metrics) is dict
            and (not metrics or _are_lists_of_numbers(metrics.values()))
        ):
            return cls(seconds, score, failure, extra, metrics)
        raise BadMessage(f"a result of other types: {score!r:.80}")


def _are_lists_of_numbers(values: Iterable[object]) -> bool:
    return all(type(each) is list and all(type(x) is float for x in each) for each in values)


def parse_message(data: bytes) -> tuple[str, list[Any]]:
    """The kind of a worker's message, and what comes with it.

    Raises:
        BadMessage: it is no such message.
    """
    try:
        message = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise BadMessage(f"no JSON: {data!r:.80}") from None
    if type(message) is not list or not message:
        raise BadMessage(f"no list: {message!r:.80}")
    kind = message.pop(0)
    types = MESSAGES.get(kind) if type(kind) is str else None
    if types is None or [*map(type, message[: len(types)])] != types:
        raise BadMessage(f"an unknown message: {[kind, *message]!r:.80}")
    return kind, message


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


class ScoredJob(NamedTuple):
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
    seconds, scores, failures, extras, logged = map(list, zip(*results, strict=True))
    extra: dict[str, Any] = {}
    for each in extras:
        extra.update(each)
    metrics: dict[str, list[float]] = {}
    for each in filter(None, logged):
        for name, values in each.items():
            metrics.setdefault(name, []).extend(values)
    return ScoredJob(job.id, scores, failures, seconds, extra, metrics)
