"""What environment workers answer: tools may write to their pipes, so it is checked."""

import json
from collections.abc import Hashable
from typing import Any, NamedTuple

from lit_rlsched.rewards.jobs import BadMessage, Result


class Answer(NamedTuple):
    """What an environment has answered, or why it has not."""

    key: Hashable
    what: str
    """`open`, `call`, `reward`; or `lost`: its worker has died because of another session."""
    result: Any
    """Of `open` the observation, of `call` name, reply (a text or a list) and failure of each call,
    of `reward` the results of functions by number."""
    failure: str | None
    """Begins with `raised`, `timeout`, `crashed` or `out_of_memory`."""
    state: str = ""
    """State of the environment after that, if its class gives one; `open` takes it."""


def message_of(data: bytes) -> list[Any]:
    """Return a worker's message."""
    fields = {"ready": 0, "loading": 1, "unloadable": 1, "answer": 4, "pong": 0, "worn": 0}
    try:
        message = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise BadMessage(f"invalid JSON: {data!r:.80}") from None
    known = type(message) is list and message and type(message[0]) is str
    if not known or fields.get(message[0]) != len(message) - 1:
        raise BadMessage(f"an unknown message: {message!r:.80}")
    return message


def checked(what: str, result: Any, failure: Any) -> Any:
    """Return the result of an answer, whose parts have the types that they must have."""
    if failure is not None:
        if type(failure) is not str:
            raise TypeError
        return None
    if what == "open":
        return result if result is None else str(result)
    if what == "call":
        return [
            (str(name), content if type(content) is list else str(content), bool(failed))
            for name, content, failed in result
        ]
    return {int(index): Result.received(*fields) for index, *fields in result}
