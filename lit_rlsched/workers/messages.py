"""What passes between the trainer and a worker. User code may write to the pipe: all is checked."""

import json
import pickle
from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

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
MESSAGES: dict[str, tuple[list[type], int]] = {
    "loading": ([str], 0),
    "unloadable": ([str], 0),
    "ready": ([], 0),
    "begun": ([float], 0),
    "score": ([int, int, float], 5),
    "answer": ([int], 3),
    "pong": ([], 0),
    "worn": ([], 0),
}
"""Kind of a worker's message -> types of its first fields, and how many follow."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class BadMessage(Exception):
    """A worker sent something that it never sends by itself."""


class Result(NamedTuple):
    """Outcome of one call of one reward function."""

    seconds: float | None
    score: float | None
    failure: str | None
    extra: dict[str, Any]
    metrics: dict[str, list[float]]

    @classmethod
    def received(cls, seconds: Any, score: Any, failure: Any, extra: Any, metrics: Any) -> "Result":
        """Check the fields that a worker sent.

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
    kind, *fields = message
    types, more = MESSAGES.get(kind, ([], -1)) if type(kind) is str else ([], -1)
    if len(fields) != len(types) + more or [*map(type, fields[: len(types)])] != types:
        raise BadMessage(f"an unknown message: {message!r:.80}")
    return kind, fields


def packed_row(
    prompt: Any,
    completion: Any,
    completion_ids: Sequence[int],
    columns: Mapping[str, Any],
    trainer_state: Any,
) -> bytes:
    """Return what `workers.child.Call` makes the arguments of a function from."""
    row = {name: value for name, value in columns.items() if name not in _NOT_COLUMNS}
    row.update(
        prompts=prompt,
        completions=completion,
        completion_ids=array("q", completion_ids),
        trainer_state=trainer_state,
    )
    return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
