"""Completions on their way through the reward functions, their results, and failure counts."""

import json
import logging
import math
import pickle
from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

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
"""First word of a failure -> last part of its metric key."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
LOGGED_KINDS = ("no_answer", "unparsed")
"""Kinds that a function reports itself, with `log_failure`."""
MESSAGES: dict[str, list[type]] = {
    "loading": [int],
    "unloadable": [int, str],
    "ready": [],
    "begun": [float],
    "score": [int, int, float],
}
"""Kind of a worker's message -> types of its fields. A score has more: `Result.received`."""


class BadMessage(Exception):
    """A reward worker sent something that `reward_worker.py` never sends."""


class Result(NamedTuple):
    """Outcome of one call of one function."""

    seconds: float | None
    score: float | None
    failure: str | None
    extra: dict[str, Any]
    metrics: dict[str, list[float]]

    @classmethod
    def received(cls, seconds: Any, score: Any, failure: Any, extra: Any, metrics: Any) -> "Result":
        """Check the fields that a worker sent: reward functions may write to its pipe.

        Raises:
            BadMessage: a field has another type, or the score is not finite.
        """
        if (  # one expression that compares types, as this is done for each score
            (score is None or (type(score) is float and isfinite(score)))
            and (seconds is None or (type(seconds) is float and isfinite(seconds)))
            and (failure is None or (type(failure) is str and kind_of(failure) in FAILURE_KINDS))
            and type(extra) is type(metrics) is dict
            and (not metrics or _are_lists_of_numbers(metrics.values()))
        ):
            return cls(seconds, score, failure, extra, metrics)
        raise BadMessage(f"a result with wrong types: {score!r:.80}")


def _are_lists_of_numbers(values: Iterable[object]) -> bool:
    return all(type(each) is list and all(type(x) is float for x in each) for each in values)


def kind_of(failure: str) -> str:
    return failure.partition(":")[0]


def parse_message(data: bytes) -> tuple[str, list[Any]]:
    """Return the kind and the fields of a worker's message."""
    try:
        message = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise BadMessage(f"invalid JSON: {data!r:.80}") from None
    if type(message) is not list or not message:
        raise BadMessage(f"JSON that is not a list: {message!r:.80}")
    kind = message.pop(0)
    types = MESSAGES.get(kind) if type(kind) is str else None
    checked = message[:3] if kind == "score" else message
    if types is None or [*map(type, checked)] != types:
        raise BadMessage(f"an unknown message: {[kind, *message]!r:.80}")
    return kind, message


def packed_row(
    prompt: Any,
    completion: Any,
    completion_ids: Sequence[int],
    columns: Mapping[str, Any],
    trainer_state: Any,
) -> bytes:
    """Return what `reward_worker.Call` makes the arguments of a function from."""
    row = {name: value for name, value in columns.items() if name not in _NOT_COLUMNS}
    row.update(
        prompts=prompt,
        completions=completion,
        completion_ids=array("q", completion_ids),
        trainer_state=trainer_state,
    )
    return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)


@dataclass(slots=True)
class Job:
    """One completion on its way through the functions."""

    key: int
    id: Hashable
    payload: bytes
    timeout: float
    results: list[Result | None]
    alone: bool = False
    """Whether it must be the only job in its batch."""
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        return None not in self.results

    def todo(self, functions: Collection[int]) -> list[int]:
        """Return the `functions` that have not scored it."""
        return [index for index in functions if self.results[index] is None]


class ScoredJob(NamedTuple):
    """Results of one completion. Every list is in the order of the reward functions."""

    job_id: Hashable
    scores: list[float | None]
    """None where the function returned None or NaN, or failed."""
    failures: list[str | None]
    """Why a function gave no score, beginning with one of `FAILURE_KINDS`; None if it gave one."""
    seconds: list[float | None]
    """Duration of each call; None if it never ended."""
    extra: dict[str, Any]
    """Column -> value that the functions passed to `log_extra`."""
    metrics: dict[str, list[float]]
    """Name -> values that the functions passed to `log_metric`."""


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


class FailureCounts:
    """Counts of failures. The 1st, 10th, 100th ... of each kind is logged."""

    def __init__(self, names: Sequence[str], log_failures: Sequence[bool]) -> None:
        self._counts: Counter[str] = Counter()
        self._keys = [
            f"rewards/{name}/{plural}"
            for name, logs in zip(names, log_failures, strict=True)
            for kind, plural in FAILURE_KINDS.items()
            if logs or kind not in LOGGED_KINDS
        ]

    def add(self, name: str, failure: str) -> None:
        plural = FAILURE_KINDS[kind_of(failure)]
        key = f"rewards/{name}/{plural}"
        self._counts[key] += 1
        count = self._counts[key]
        if math.log10(count).is_integer():
            logger.warning(
                "reward function `%s` gave no score for a completion: %s [%s no. %d]",
                *(name, failure, plural, count),
            )

    def by_key(self) -> dict[str, int]:
        """Return the number of failures by metric key, zeros included."""
        return {key: self._counts[key] for key in self._keys}
