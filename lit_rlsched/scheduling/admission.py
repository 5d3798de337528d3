"""Which waiting request takes a free slot, and when."""

from collections import deque
from collections.abc import Iterable
from typing import Literal

from lit_rlsched.rollout.types import Request

Refill = Literal["continuous", "rounds"]


class Admission:
    """A queue in front of the engine: at most `slots` requests are let in at once.

    `continuous` refills a slot in the step after it was freed (Infinite Sampling's continuous
    sampling, arXiv 2506.22950); `rounds` lets the next `slots` requests in only when all of the
    last have finished (its naive micro sampling groups). Requests go in as they came.

    Args:
        slots: Most requests that decode at once.
        refill: When freed slots are refilled.
    """

    def __init__(self, slots: int, refill: Refill = "continuous") -> None:
        self.slots = slots
        self.refill = refill
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, requests: Iterable[Request]) -> None:
        """Let requests wait."""
        self._queue.extend(requests)

    def pop(self, running: int) -> list[Request]:
        """The requests that go in now, given how many are running."""
        if running and self.refill == "rounds":
            return []
        free = min(self.slots - running, len(self._queue))
        return [self._queue.popleft() for _ in range(free)]

    def clear(self) -> list[Request]:
        """Forget what waits, and return it."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting


def slots_for_budget(budget: int, kv_bytes_per_token: int, tokens_per_completion: int) -> int:
    """Slots that fit into a memory budget when every completion is as long as it may get.

    Args:
        budget: Bytes of key-value cache.
        kv_bytes_per_token: Bytes a token takes in all layers.
        tokens_per_completion: Longest prompt plus `max_completion_length`.

    Raises:
        ValueError: not even one completion fits.
    """
    one = kv_bytes_per_token * tokens_per_completion
    if budget < one:
        raise ValueError(
            f"`memory_budget={budget}` bytes is less than one completion may take: {one} bytes for "
            f"{tokens_per_completion} tokens. Raise it, or lower `max_completion_length`."
        )
    return budget // one
