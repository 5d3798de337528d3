"""Which waiting request takes a free slot, and when."""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lit_rlsched.scheduling.queues import Order, PlannedQueue, waiting_queue
from lit_rlsched.types import Request

Refill = Literal["continuous", "rounds"]

TURNS = 8
"""Turns of a completion as long as it may get. More make completions stop more often; of `fifo`'s
distance to the lower bound, 8 leave a quarter."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Key-value cache that running requests may take, counted in blocks as a paged cache does."""

    tokens: int
    """Of all requests together."""
    block: int = 1
    """Tokens of a block."""
    lease: int = 128
    """Tokens a request may draw before it must ask again, where others wait."""

    def blocks(self, tokens: int) -> int:
        """Tokens of the whole blocks that `tokens` take."""
        return -(-tokens // self.block) * self.block

    def cost(self, request: Request) -> int:
        """Most that a request not yet running will take."""
        return self.blocks(len(request.prompt_ids) + request.limit)

    def growth(self, request: Request, drawn: int) -> int:
        """Most that a request will take beyond what it has, `drawn` tokens after it came in."""
        if not drawn:
            return self.cost(request)
        have = len(request.prompt_ids) + len(request.prefix_ids) + drawn
        return self.cost(request) - self.blocks(have - 1)  # the last one is not yet in the cache


class Admission:
    """The waiting room of an engine: at most `slots` requests are let in at once.

    `continuous` refills a slot in the step after it was freed (Infinite Sampling's continuous
    sampling, arXiv 2506.22950); `rounds` lets the next requests in only when all of the last have
    finished (its naive micro sampling groups).

    What is let in: first, requests that go on after a lease; then those with a `pause_at`, which
    probe (they are short, and tell of the rest); then the others in `order`.

    In `least_attained` order requests take turns: where others wait, one is let in for an eighth of
    the longest completion, then waits for those that have drawn less. So all that become long have
    begun early, and end about together, without anybody having predicted which they are: least
    attained service first, as operating systems do where the length of a job is unknown. Nobody
    takes turns in a round that may throw away what has begun; they go as in `fifo` there.

    With a `budget`, requests are let in only while all that run can never take more cache than it
    allows. So that this does not reserve room for the longest completion each time, a request is
    let in with a lease of some tokens: it pauses when it has drawn them, and asks again. The number
    of running requests then follows from the cache in use (Infinite Sampling's dynamic slots).

    Args:
        slots: Most requests that decode at once.
        refill: When freed slots are refilled.
        order: Which waiting request goes first.
        epsilon: Of the plan of `planned`.
        budget: Key-value cache that all running requests may take.
    """

    def __init__(
        self,
        slots: int,
        refill: Refill = "continuous",
        order: Order = "fifo",
        epsilon: float = 0.1,
        budget: CacheBudget | None = None,
    ) -> None:
        self.slots = slots
        self.budget = budget
        self.refill = refill
        self.order = order
        self.take_turns = True
        """Whether requests of `least_attained` order take turns in this round."""
        self._paused: deque[Request] = deque()
        self._probes: deque[Request] = deque()
        self._waiting = waiting_queue(order, epsilon)
        self._leased: set[str] = set()
        self._pushed, self._expected_tokens = 0, 0.0  # of all that came in: contexts, at their end
        self._running: dict[str, tuple[Request, int]] = {}  # and its slot
        self._free = list(range(slots))

    @property
    def pauses(self) -> bool:
        """Whether requests that are let in may have to pause for those that wait."""
        return self.budget is not None or self.order == "least_attained"

    def __len__(self) -> int:
        return len(self._paused) + len(self._probes) + len(self._waiting)

    def push(self, requests: Iterable[Request]) -> None:
        """Let requests wait."""
        for request in requests:
            leased = request.id in self._leased
            self._leased.discard(request.id)
            if leased and self.order != "least_attained":
                self._paused.appendleft(request)  # its cache is the last to be overwritten
            elif request.pause_at is not None:
                self._probes.append(request)
            else:
                self._waiting.push(request)
                self._pushed += 1
                self._expected_tokens += len(request.prompt_ids) + len(request.prefix_ids)
                self._expected_tokens += request.expected or 0.0

    def rekey(self, expected: Mapping[str, float]) -> None:
        """New estimates of the tokens that requests will draw, by id; others are ignored."""
        self._waiting.rekey(expected)

    def pop(self, running: Mapping[str, int], kv_tokens: int = 0) -> list[Request]:
        """The requests that go in now.

        Args:
            running: Tokens that each running request has drawn since it was let in.
            kv_tokens: Tokens of key-value cache in use.
        """
        if not len(self) or len(running) >= self.slots or (running and self.refill == "rounds"):
            return []
        for request_id in self._running.keys() - running.keys():
            heapq.heappush(self._free, self._running.pop(request_id)[1])
        if isinstance(self._waiting, PlannedQueue):
            self._waiting.plan(self._loads(running))
        room = self._room(running, kv_tokens)
        admitted: list[Request] = []
        while self._free and len(self):
            whole = self._peek()
            request = self._lease(whole, room)
            if self.budget is not None:
                room -= self.budget.cost(request)
                if room < 0:
                    break
            self._take()
            if request.limit < whole.limit:
                self._leased.add(request.id)
            self._running[request.id] = request, heapq.heappop(self._free)
            admitted.append(request)
        return admitted

    def discard(self, request_ids: Collection[str]) -> None:
        """Forget some of what waits."""
        self._waiting.discard(request_ids)
        self._paused = deque(r for r in self._paused if r.id not in request_ids)
        self._probes = deque(r for r in self._probes if r.id not in request_ids)
        self._leased -= set(request_ids)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._paused.clear()
        self._probes.clear()
        self._leased.clear()
        self._pushed, self._expected_tokens = 0, 0.0

    def _peek(self) -> Request:
        for queue in (self._paused, self._probes):
            if queue:
                return queue[0]
        return self._waiting.peek(self._free[0])

    def _take(self) -> None:
        for queue in (self._paused, self._probes):
            if queue:
                queue.popleft()
                return
        self._waiting.pop(self._free[0])

    def _loads(self, running: Mapping[str, int]) -> list[float]:
        """Tokens still expected of what each slot runs, as many slots as there is room for."""
        loads = [0.0] * self.slots
        for request_id, (request, slot) in self._running.items():
            loads[slot] = max((request.expected or 0.0) - running[request_id], 0.0)
        if self.budget is None or not self._pushed:
            return loads
        # a plan for slots that are never there would put off what it gave them
        usual = self._expected_tokens // self._pushed + self.budget.lease
        used = 1 + max((slot for _, slot in self._running.values()), default=0)
        return loads[: max(used, int(self.budget.tokens // usual))]

    def _room(self, running: Mapping[str, int], kv_tokens: int) -> int:
        """Tokens of the budget that neither are in use nor may be taken by what runs."""
        if self.budget is None:
            return 0
        growth = sum(self.budget.growth(r, running[r.id]) for r, _ in self._running.values())
        return self.budget.tokens - kv_tokens - growth

    def _lease(self, request: Request, room: int) -> Request:
        """The request as it is let in: whole in rounds, or where it makes nobody wait."""
        lease = request.sampling.max_completion_length
        if self.order == "least_attained" and self.take_turns and len(self) > len(self._free):
            lease = -(-lease // TURNS)
        if self.budget is not None:
            coming = min(len(self), len(self._free))
            if self.budget.cost(request) * coming > room:
                lease = min(lease, self.budget.lease)
        pause_at = len(request.prefix_ids) + lease
        if self.refill == "rounds" or pause_at >= request.limit:
            return request
        return replace(request, pause_at=pause_at)
