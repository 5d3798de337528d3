"""In which order requests wait: as they came, by expected length, or by a plan over the slots."""

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from lit_rlsched.scheduling.planning import plan_makespan
from lit_rlsched.types import Request

Order = Literal["fifo", "least_attained", "shortest_first", "longest_first", "planned"]

REPLAN_SHARE = 1 / 8
"""Share of the waiting requests that must be new or newly estimated before a plan is made anew:
few enough plans to cost nothing, and a plan is never far out of date."""


class WaitingQueue(Protocol):
    """Requests that wait for a slot."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Let a request wait."""

    def peek(self, slot: int) -> Request:
        """What slot `slot` takes next; raises `IndexError` where nothing waits."""

    def pop(self, slot: int) -> Request:
        """Take it out."""

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates by request id; what does not wait here is passed over."""

    def discard(self, request_ids: Collection[str]) -> None:
        """Take those out that wait here."""

    def clear(self) -> None:
        """Take everything out."""


class FifoQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: Request) -> None:
        """Let a request wait."""
        self._queue.append(request)

    def peek(self, slot: int) -> Request:
        """The oldest."""
        return self._queue[0]

    def pop(self, slot: int) -> Request:
        """Take the oldest out."""
        return self._queue.popleft()

    def rekey(self, expected: Mapping[str, float]) -> None:
        """Nothing to do."""

    def discard(self, request_ids: Collection[str]) -> None:
        """Take those out that wait here."""
        self._queue = deque(r for r in self._queue if r.id not in request_ids)

    def clear(self) -> None:
        """Take everything out."""
        self._queue.clear()


class SortedQueue:
    """By expected tokens, then by arrival; what nobody predicts counts as 0.

    Args:
        longest: Whether the longest goes first rather than the shortest.
    """

    def __init__(self, longest: bool) -> None:
        self._sign = -1 if longest else 1
        self._waiting: dict[str, Request] = {}
        self._entries: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], str]] = []  # may hold what is no longer so
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def push(self, request: Request) -> None:
        """Let a request wait."""
        self._arrivals += 1
        self._enter(request, self._arrivals)

    def peek(self, slot: int = 0) -> Request:
        """The first in the order."""
        while self._entries.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][1]]

    def pop(self, slot: int = 0) -> Request:
        """Take the first out."""
        return self.remove(self.peek().id)

    def get(self, request_id: str) -> Request:
        """One that waits."""
        return self._waiting[request_id]

    def remove(self, request_id: str) -> Request:
        """Take one out."""
        del self._entries[request_id]
        return self._waiting.pop(request_id)

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates."""
        for request_id in expected.keys() & self._waiting.keys():
            request = replace(self._waiting[request_id], expected=expected[request_id])
            self._enter(request, self._entries[request_id][1])

    def discard(self, request_ids: Collection[str]) -> None:
        """Take those out that wait here."""
        for request_id in self._waiting.keys() & set(request_ids):
            self.remove(request_id)

    def requests(self) -> list[Request]:
        """What waits, in the order it came."""
        return list(self._waiting.values())

    def clear(self) -> None:
        """Take everything out."""
        self._waiting, self._entries, self._heap = {}, {}, []

    def _key(self, request: Request) -> float:
        return self._sign * (request.expected or 0.0)

    def _enter(self, request: Request, arrival: int) -> None:
        entry = self._key(request), arrival
        self._waiting[request.id], self._entries[request.id] = request, entry
        heapq.heappush(self._heap, (entry, request.id))


class LeastAttainedQueue(SortedQueue):
    """By tokens drawn so far, the fewest first, then by arrival."""

    def __init__(self) -> None:
        super().__init__(longest=False)

    def _key(self, request: Request) -> float:
        return len(request.prefix_ids)


class PlannedQueue:
    """Infinite Sampling's two stages (arXiv 2506.22950): plan ahead, then steal.

    All that waits is spread over the slots so that the last of them ends early (`plan_makespan`).
    A slot takes the longest of its own share; where that is used up, it steals the shortest that
    has not started anywhere. With exact lengths stealing never ends later than the plan.

    Args:
        epsilon: See `plan_makespan`.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._waiting = SortedQueue(longest=False)  # what would be stolen first
        self._shares: list[deque[str]] = []
        self._changes = 0  # requests new or newly estimated since the plan was made

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Let a request wait."""
        self._waiting.push(request)
        self._changes += 1

    def plan(self, loads: Sequence[float]) -> None:
        """Plan, if enough has changed since the last time.

        Args:
            loads: Tokens expected of what each slot runs already.
        """
        if self._changes == 0 or self._changes < REPLAN_SHARE * len(self):
            return
        requests = self._waiting.requests()
        plan = plan_makespan(
            [r.expected or 0.0 for r in requests], len(loads), self.epsilon, loads=loads
        )
        self._shares = [deque(requests[i].id for i in share) for share in plan]
        self._changes = 0

    def peek(self, slot: int) -> Request:
        """The next of the slot's share, or the shortest of all."""
        share = self._shares[slot] if slot < len(self._shares) else ()
        while share:
            if share[0] in self._waiting:
                return self._waiting.get(share[0])
            share.popleft()  # stolen
        return self._waiting.peek()

    def pop(self, slot: int) -> Request:
        """Take it out."""
        return self._waiting.remove(self.peek(slot).id)

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates; they count towards the next plan."""
        self._changes += sum(request_id in self._waiting for request_id in expected)
        self._waiting.rekey(expected)

    def discard(self, request_ids: Collection[str]) -> None:
        """Take those out that wait here; the others keep to the plan."""
        self._waiting.discard(request_ids)

    def clear(self) -> None:
        """Take everything out."""
        self._shares, self._changes = [], 0
        self._waiting.clear()


def waiting_queue(order: Order, epsilon: float) -> WaitingQueue:
    """The queue of an order."""
    if order == "planned":
        return PlannedQueue(epsilon)
    if order == "least_attained":
        return LeastAttainedQueue()
    return FifoQueue() if order == "fifo" else SortedQueue(longest=order == "longest_first")
