"""Admission: which waiting request takes a free slot, and when."""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lit_rlsched.scheduling.planning import plan_makespan
from lit_rlsched.types import Request

Order = Literal["fifo", "least_attained", "shortest_first", "longest_first", "planned"]

REPLAN_SHARE = 1 / 8
"""A new plan is made once this share of the waiting requests is new or has a new prediction."""

KEYS: dict[Order, Callable[[Request], float]] = {
    "fifo": lambda request: 0.0,
    "least_attained": lambda request: len(request.prefix_ids),
    "shortest_first": lambda request: steps_left(request),
    "longest_first": lambda request: -steps_left(request),
}
"""What each order sorts by, lowest first. A request without a prediction counts as length 0."""


def steps_left(request: Request) -> float:
    """Return how many decode steps a request will take: for its tokens, and while its tools run."""
    return (request.expected or 0.0) * (1.0 + request.waits)


class _Entry(NamedTuple):
    later: bool
    key: float
    arrival: int
    request_id: str


class WaitingQueue:
    """Requests sorted by the key of an order, and by arrival where keys are equal.

    Requests that are `later` come after all others.
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
        """Make a new plan if enough has changed since the last one."""
        if self._changes == 0 or self._changes < REPLAN_SHARE * len(self):
            return
        requests = [request for request in self._requests.values() if not request.later]
        lengths = [*map(steps_left, requests)]
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


Refill = Literal["continuous", "rounds"]

TURNS = 8
"""Turns that a completion of the maximum length takes in `least_attained` order. More turns mean
more pauses; 8 remove three quarters of the gap between `fifo` and the lower bound."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Limit on the key-value cache of all running requests, counted in blocks as a paged cache."""

    tokens: int
    """Tokens of all requests together."""
    block: int = 1
    """Tokens of a block."""
    lease: int = 128
    """Tokens that a request may draw before it pauses, where others wait."""

    def blocks(self, tokens: int) -> int:
        """Round `tokens` up to whole blocks."""
        return -(-tokens // self.block) * self.block

    def cost(self, request: Request) -> int:
        """Maximum number of tokens that a request takes when it is not running yet."""
        return self.blocks(len(request.prompt_ids) + request.limit)

    def growth(self, request: Request, drawn: int) -> int:
        """Maximum number of tokens that a request may still take after drawing `drawn` tokens."""
        if not drawn:
            return self.cost(request)
        have = len(request.prompt_ids) + len(request.prefix_ids) + drawn
        return self.cost(request) - self.blocks(have - 1)  # the newest token is not cached yet


class Admission:
    """Decides which waiting requests an engine of `slots` slots starts in each step.

    Requests that resume after a lease go first. Then come those that return from an environment,
    and requests with a `pause_at`: they probe, so they are short, and a length predictor needs
    their tokens. The others follow in `order`.

    In `least_attained` order (least attained service first, as in operating systems) requests take
    turns. While others wait, a request is admitted for an eighth of the maximum length, then pauses
    until requests with fewer tokens have caught up. No request makes way for `later` ones. Long
    completions thus start early and end at about the same time, without any prediction. Rounds that
    may throw away unfinished completions set `take_turns` to false: requests then keep their slot,
    as in `fifo`.

    With a `budget`, a request is admitted only if all running requests can never take more cache
    than the budget (the dynamic slots of Infinite Sampling, arXiv 2506.22950). To reserve less than
    a whole completion, a request is admitted for a lease of some tokens, pauses, and waits again.
    """

    def __init__(
        self,
        slots: int,
        refill: Refill = "continuous",
        order: Order = "fifo",
        budget: CacheBudget | None = None,
    ) -> None:
        self.slots = slots
        self.budget = budget
        self.refill = refill
        self.order = order
        self.take_turns = True
        """Whether requests of `least_attained` order take turns in this round."""
        self._first: deque[Request] = deque()  # the last one to pause, the others, then probes
        self._waiting = waiting_queue(order)
        self._leased: set[str] = set()
        self._pushed, self._expected_tokens = 0, 0.0  # into `_waiting`; their contexts at the end
        self._running: dict[str, tuple[Request, int]] = {}  # with the slot
        self._free = list(range(slots))

    @property
    def pauses(self) -> bool:
        """Whether admitted requests may have to pause while others wait."""
        return self.budget is not None or self.order == "least_attained"

    def __len__(self) -> int:
        return len(self._first) + len(self._waiting)

    def push(self, requests: Iterable[Request]) -> None:
        for request in requests:
            leased = request.id in self._leased
            self._leased.discard(request.id)
            if leased and self.order != "least_attained":
                self._first.appendleft(request)  # its cache is the last to be overwritten
            elif request.pause_at is not None or (
                request.returns and self.order != "least_attained"
            ):
                self._first.append(request)
            else:
                self._waiting.push(request)
                self._pushed += 1
                self._expected_tokens += len(request.prompt_ids) + len(request.prefix_ids)
                self._expected_tokens += request.expected or 0.0

    def rekey(self, expected: Mapping[str, float]) -> None:
        """Set new predictions of tokens to come, by request id; other ids are ignored."""
        self._waiting.rekey(expected)

    def pop(self, running: Mapping[str, int], kv_tokens: int = 0) -> list[Request]:
        """Remove and return the requests that start now."""
        if not len(self) or len(running) >= self.slots or (running and self.refill == "rounds"):
            return []
        for request_id in self._running.keys() - running.keys():
            heapq.heappush(self._free, self._running.pop(request_id)[1])
        if isinstance(self._waiting, PlannedQueue):
            self._waiting.plan(self._loads(running))
        room = self._room(running, kv_tokens)
        admitted: list[Request] = []
        while self._free and len(self):
            slot = self._free[0]
            whole = self._first[0] if self._first else self._waiting.peek(slot)
            request = self._lease(whole, room)
            if self.budget is not None:
                room -= self.budget.cost(request)
                if room < 0:
                    break
            if self._first:
                self._first.popleft()
            else:
                self._waiting.pop(slot)
            if request.limit < whole.limit:
                self._leased.add(request.id)
            self._running[request.id] = request, heapq.heappop(self._free)
            admitted.append(request)
        return admitted

    def discard(self, request_ids: Collection[str]) -> None:
        """Remove these requests if they wait."""
        self._waiting.discard(request_ids)
        self._first = deque(r for r in self._first if r.id not in request_ids)
        self._leased -= set(request_ids)

    def clear(self) -> None:
        self._waiting.clear()
        self._first.clear()
        self._leased.clear()
        self._pushed, self._expected_tokens = 0, 0.0

    def _loads(self, running: Mapping[str, int]) -> list[float]:
        """Tokens still expected of each slot's request, for as many slots as the budget allows."""
        loads = [0.0] * self.slots
        for request_id, (request, slot) in self._running.items():
            loads[slot] = max((request.expected or 0.0) - running[request_id], 0.0)
        if self.budget is None or not self._pushed:
            return loads
        # requests planned for a slot that memory never allows would wait until the end
        usual = self._expected_tokens // self._pushed + self.budget.lease
        used = 1 + max((slot for _, slot in self._running.values()), default=0)
        return loads[: max(used, int(self.budget.tokens // usual))]

    def _room(self, running: Mapping[str, int], kv_tokens: int) -> int:
        """Tokens of the budget that running requests neither use nor may still take."""
        if self.budget is None:
            return 0
        growth = sum(self.budget.growth(r, running[r.id]) for r, _ in self._running.values())
        return self.budget.tokens - kv_tokens - growth

    def _lease(self, request: Request, room: int) -> Request:
        """The request as it is admitted, with a `pause_at` where it must make way for others."""
        lease = request.sampling.max_completion_length
        if self.order == "least_attained" and self.take_turns:
            others = len(self) if request.later else len(self) - self._waiting.later
            if others > len(self._free):
                lease = -(-lease // TURNS)
        if self.budget is not None:
            coming = min(len(self), len(self._free))
            if self.budget.cost(request) * coming > room:
                lease = min(lease, self.budget.lease)
        pause_at = len(request.prefix_ids) + lease
        if self.refill == "rounds" or pause_at >= request.limit:
            return request
        return replace(request, pause_at=pause_at)
