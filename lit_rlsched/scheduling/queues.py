"""Queues of requests that wait for a slot: by arrival, by length, or by a plan over the slots."""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from lit_rlsched.scheduling.planning import plan_makespan
from lit_rlsched.types import Request

Order = Literal["fifo", "least_attained", "shortest_first", "longest_first", "planned"]

REPLAN_SHARE = 1 / 8
"""A new plan is made once this share of the waiting requests is new or has a new prediction."""

KEYS: dict[Order, Callable[[Request], float]] = {
    "fifo": lambda request: 0.0,
    "least_attained": lambda request: len(request.prefix_ids),
    "shortest_first": lambda request: request.expected or 0.0,
    "longest_first": lambda request: -(request.expected or 0.0),
}
"""What each order sorts by, lowest first. A request without a prediction counts as length 0."""


class _Entry(NamedTuple):
    later: bool
    key: float
    arrival: int
    request_id: str


class WaitingQueue:
    """Requests sorted by the key of an order, and by arrival where keys are equal.

    Requests that are `later` come after all others.

    Args:
        order: One of `KEYS`.
    """

    def __init__(self, order: Order) -> None:
        self._order: Order = order
        self._requests: dict[str, Request] = {}
        self._entries: dict[str, _Entry] = {}
        self._heap: list[_Entry] = []  # may also hold entries that are no longer in `_entries`
        self._arrivals = 0
        self.later = 0
        """Number of waiting requests that are `later`."""

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._arrivals += 1
        if request.later:
            self.later += 1
        self._enter(request, self._arrivals)

    def peek(self, slot: int) -> Request:
        """Return the request that `slot` takes next; raise `IndexError` if the queue is empty."""
        while self._entries.get(self._heap[0].request_id) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0].request_id]

    def pop(self, slot: int) -> Request:
        return self._remove(self.peek(slot).id)

    def rekey(self, expected: Mapping[str, float]) -> None:
        """Set new predictions by request id; ids that do not wait here are ignored."""
        for request_id in expected.keys() & self._requests.keys():
            request = replace(self._requests[request_id], expected=expected[request_id])
            self._enter(request, self._entries[request_id].arrival)

    def discard(self, request_ids: Collection[str]) -> None:
        """Remove these requests; ids that do not wait here are ignored."""
        for request_id in self._requests.keys() & set(request_ids):
            self._remove(request_id)

    def clear(self) -> None:
        self._requests, self._entries, self._heap, self.later = {}, {}, [], 0

    def _enter(self, request: Request, arrival: int) -> None:
        entry = _Entry(request.later, KEYS[self._order](request), arrival, request.id)
        self._requests[request.id] = request
        if self._entries.get(request.id) != entry:
            self._entries[request.id] = entry
            heapq.heappush(self._heap, entry)

    def _remove(self, request_id: str) -> Request:
        if self._entries.pop(request_id).later:
            self.later -= 1
        return self._requests.pop(request_id)


class PlannedQueue(WaitingQueue):
    """The two stages of Infinite Sampling (arXiv 2506.22950): plan ahead, then steal.

    `plan` spreads the waiting requests over the slots so that the last slot ends early
    (`plan_makespan`). A slot takes the longest request of its share. A slot whose share is used up
    steals the shortest request of all. With exact lengths, stealing never ends later than the plan.
    """

    def __init__(self) -> None:
        super().__init__("shortest_first")  # the order in which requests are stolen
        self._shares: list[deque[str]] = []
        self._changes = 0  # requests that are new, or have a new prediction, since the last plan

    def push(self, request: Request) -> None:
        """Add a request; it has no share before the next plan."""
        super().push(request)
        self._changes += 1

    def plan(self, loads: Sequence[float]) -> None:
        """Make a new plan if enough has changed since the last one.

        Args:
            loads: Tokens that each slot's running request is still expected to draw.
        """
        if self._changes == 0 or self._changes < REPLAN_SHARE * len(self):
            return
        requests = [request for request in self._requests.values() if not request.later]
        lengths = [request.expected or 0.0 for request in requests]
        plan = plan_makespan(lengths, len(loads), loads=loads)
        self._shares = [deque(requests[i].id for i in share) for share in plan]
        self._changes = 0

    def peek(self, slot: int) -> Request:
        """Return the next request of the slot's share, or else the shortest of all."""
        share = self._shares[slot] if slot < len(self._shares) else deque()
        while share:
            if share[0] in self._requests:
                return self._requests[share[0]]
            share.popleft()  # another slot has stolen it
        return super().peek(slot)

    def rekey(self, expected: Mapping[str, float]) -> None:
        """Set new predictions; they count towards the next plan."""
        self._changes += sum(request_id in self._requests for request_id in expected)
        super().rekey(expected)

    def clear(self) -> None:
        super().clear()
        self._shares, self._changes = [], 0


def waiting_queue(order: Order) -> WaitingQueue:
    return PlannedQueue() if order == "planned" else WaitingQueue(order)
