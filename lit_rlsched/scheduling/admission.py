"""Infinite Sampling: how many completions decode at once, and which takes the next free slot.

`SlotSettings` turns the settings of the callback `MicroGroupSampling` and the size of the engine's
key-value cache into an `Admission`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lit_rlsched.scheduling.planning import plan_makespan
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request

Order = Literal["fifo", "shortest_first", "longest_first", "planned"]
Refill = Literal["continuous", "rounds"]

REPLAN_SHARE = 1 / 8
"""A new plan is made once this share of the waiting requests is new."""

KEYS: dict[Order, Callable[[Request], float]] = {
    "fifo": lambda request: 0.0,
    "shortest_first": lambda request: steps_left(request),
    "longest_first": lambda request: -steps_left(request),
}
"""What each order sorts by, lowest first. A request without a prediction counts as length 0."""


def steps_left(request: Request) -> float:
    """Return how many decode steps a request will take: for its tokens, and while its tools run."""
    return (request.expected or 0.0) * (1.0 + request.waits)


class WaitingQueue:
    """Requests sorted by the key of an order, and by arrival where keys are equal.

    Requests that are `later` come after all others.

    The order `planned` has the two stages of Infinite Sampling (arXiv 2506.22950): plan ahead, then
    steal. `plan` spreads the waiting requests over the slots so that the last slot ends early
    (`plan_makespan`). A slot takes the longest request of its share. A slot whose share is used up
    steals the shortest request of all. With exact lengths, stealing never ends later than the plan.
    """

    def __init__(self, order: Order) -> None:
        self._order: Order = "shortest_first" if order == "planned" else order  # is pickled
        self._requests: dict[int, Request] = {}
        """Requests by the number of their arrival."""
        self._heap: list[tuple[bool, float, int]] = []  # also of requests that have left
        self._arrivals = 0
        self._shares: list[deque[int]] = []
        self._planned = 0  # arrivals before the last plan

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._arrivals += 1
        self._requests[self._arrivals] = request
        heapq.heappush(self._heap, (request.later, KEYS[self._order](request), self._arrivals))

    def plan(self, loads: Sequence[float]) -> None:
        """Make a new plan if enough has come since the last one."""
        new = self._arrivals - self._planned
        if new == 0 or new < REPLAN_SHARE * len(self):
            return
        planned = [number for number, request in self._requests.items() if not request.later]
        lengths = [steps_left(self._requests[number]) for number in planned]
        plan = plan_makespan(lengths, len(loads), loads=loads)
        self._shares = [deque(planned[i] for i in share) for share in plan]
        self._planned = self._arrivals

    def peek(self, slot: int) -> Request:
        """Return the request that `slot` takes next; raise `IndexError` if the queue is empty."""
        return self._requests[self._next(slot)]

    def pop(self, slot: int) -> Request:
        return self._requests.pop(self._next(slot))

    def _next(self, slot: int) -> int:
        share: deque[int] = self._shares[slot] if slot < len(self._shares) else deque()
        while share and share[0] not in self._requests:
            share.popleft()  # another slot has stolen it
        while not share and self._heap[0][-1] not in self._requests:
            heapq.heappop(self._heap)
        return share[0] if share else self._heap[0][-1]

    def discard(self, request_ids: Collection[str]) -> None:
        """Remove these requests; ids that do not wait here are ignored."""
        gone = set(request_ids)
        self._requests = {n: each for n, each in self._requests.items() if each.id not in gone}


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Limit on the key-value cache of all running requests, counted in blocks as a paged cache."""

    tokens: int
    """Tokens of all requests together."""
    block: int = 1
    """Tokens of a block."""
    quantum: int = 128
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

    Requests that resume after a quantum go first. Then come those that return from an environment,
    and requests with a `pause_at`: they probe, so they are short, and a length predictor needs
    their tokens. The others follow in `order`.

    With a `budget`, a request is admitted only if all running requests can never take more cache
    than the budget (the dynamic slots of Infinite Sampling, arXiv 2506.22950). To reserve less than
    a whole completion, a request is admitted for a quantum of some tokens, pauses, and waits again.
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
        self.clear()
        self._running: dict[str, tuple[Request, int]] = {}  # with the slot
        self._free = list(range(slots))

    def clear(self) -> None:
        """Forget what waits."""
        self._first: deque[Request] = deque()  # the last one to pause, the others, then probes
        self._waiting = WaitingQueue(self.order)
        self._with_quantum: set[str] = set()
        self._pushed, self._expected_tokens = 0, 0.0  # into `_waiting`; their contexts at the end

    def __len__(self) -> int:
        return len(self._first) + len(self._waiting)

    def push(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.id in self._with_quantum:
                self._with_quantum.remove(request.id)
                self._first.appendleft(request)  # its cache is the last to be overwritten
            elif request.pause_at is not None or request.returns:
                self._first.append(request)
            else:
                self._waiting.push(request)
                self._pushed += 1
                self._expected_tokens += len(request.prompt_ids) + len(request.prefix_ids)
                self._expected_tokens += request.expected or 0.0

    def pop(self, running: Mapping[str, int], kv_tokens: int = 0) -> list[Request]:
        """Remove and return the requests that start now.

        `running` has the tokens that each running request has drawn since it was admitted,
        `kv_tokens` those in the engine's cache.
        """
        if not len(self) or len(running) >= self.slots or (running and self.refill == "rounds"):
            return []
        for request_id in self._running.keys() - running.keys():
            heapq.heappush(self._free, self._running.pop(request_id)[1])
        if self.order == "planned":
            self._waiting.plan(self._loads(running))
        room = 0
        if self.budget is not None:  # what running requests neither use nor may still take
            growth = sum(self.budget.growth(r, running[r.id]) for r, _ in self._running.values())
            room = self.budget.tokens - kv_tokens - growth
        admitted: list[Request] = []
        while self._free and len(self):
            slot = self._free[0]
            whole = request = self._first[0] if self._first else self._waiting.peek(slot)
            if (budget := self.budget) is not None:
                short = budget.cost(whole) * min(len(self), len(self._free)) > room
                pause_at = len(whole.prefix_ids) + budget.quantum
                if short and self.refill == "continuous" and pause_at < whole.limit:
                    request = replace(whole, pause_at=pause_at)
                room -= budget.cost(request)
                if room < 0:
                    break
            if self._first:
                self._first.popleft()
            else:
                self._waiting.pop(slot)
            if request.limit < whole.limit:
                self._with_quantum.add(request.id)
            self._running[request.id] = request, heapq.heappop(self._free)
            admitted.append(request)
        return admitted

    def _loads(self, running: Mapping[str, int]) -> list[float]:
        """Tokens still expected of each slot's request, for as many slots as the budget allows."""
        loads = [0.0] * self.slots
        for request_id, (request, slot) in self._running.items():
            loads[slot] = max((request.expected or 0.0) - running[request_id], 0.0)
        if self.budget is None or not self._pushed:
            return loads
        # requests planned for a slot that memory never allows would wait until the end
        usual = self._expected_tokens // self._pushed + self.budget.quantum
        used = 1 + max((slot for _, slot in self._running.values()), default=0)
        return loads[: max(used, int(self.budget.tokens // usual))]

    def discard(self, request_ids: Collection[str]) -> None:
        """Remove these requests if they wait."""
        self._waiting.discard(request_ids)
        self._first = deque(r for r in self._first if r.id not in request_ids)
        self._with_quantum -= set(request_ids)


DEFAULT_SLOTS = 256
"""vLLM's default on a CPU and on most GPUs, where more slots hardly raise the throughput."""
QUANTA = 8
"""Quanta of a completion of the maximum length. More quanta let more completions run in the same
memory, and make them pause more often."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Size of an engine's key-value cache."""

    token_bytes: int
    """Bytes per token in all layers."""
    longest: int
    """Tokens of the longest prompt plus `max_completion_length`."""
    block: int | None = None
    """Tokens of a block; `None`: not paged, each slot reserves `longest` tokens."""
    capacity: int | None = None
    """Tokens that fit; `None`: the cache grows, or the engine has not started yet."""

    @property
    def whole(self) -> int:
        """`longest`, rounded up to whole blocks."""
        block = self.block or 1
        return -(-self.longest // block) * block


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """The arguments of `MicroGroupSampling`, which documents them."""

    slots: int | None = None
    memory_budget: int | None = None
    """Bytes."""
    refill: Refill = "continuous"
    order: Order | None = None
    engines: int = 1
    """Number of engines that the settings were divided by."""

    def share(self, engines: int) -> "SlotSettings":
        """Return the settings of each of several engines."""
        slots, budget = self.slots, self.memory_budget
        if slots is not None and slots % engines:
            raise UsageError(
                f"`MicroGroupSampling(slots={slots})` with `num_engines={engines}`: each engine "
                f"has the same number of slots. Use {max(1, slots // engines) * engines} slots."
            )
        return replace(
            self,
            slots=None if slots is None else slots // engines,
            memory_budget=None if budget is None else budget // engines,
            engines=engines,
        )

    @property
    def _each(self) -> str:
        """What a message says beside a value of one engine."""
        return f" on each of {self.engines} engines" if self.engines > 1 else ""

    def resolved_order(self, predicted: bool, early: bool = False) -> Order:
        """The order of the waiting completions, by default the one that measured best."""
        if self.order is None:
            return ("shortest_first" if early else "longest_first") if predicted else "fifo"
        if self.order != "fifo" and not predicted:
            raise UsageError(
                f"`MicroGroupSampling(order={self.order!r})` needs predicted lengths. Add the "
                "callback `LengthPrediction()`, or use `order='fifo'`."
            )
        return self.order

    def engine_slots(
        self, cache: KVCache, completions: int, shortest: int, by_default: int = DEFAULT_SLOTS
    ) -> int:
        """Maximum number of requests inside each engine; `admission` may admit fewer."""
        if self.slots is not None:
            return min(completions, self.slots)
        most = min(completions, by_default)
        if self.memory_budget is None:
            return most
        # a completion in whole blocks, with one block that the engine may keep
        least = cache.longest if cache.block is None else cache.whole + cache.block
        if self.memory_budget < (one := cache.token_bytes * least):
            raise UsageError(
                f"`memory_budget={self.memory_budget}` bytes{self._each} is less than one "
                f"completion may take: {one} bytes for {least} tokens. Raise it, or lower "
                "`max_completion_length`."
            )
        if cache.block is None:
            return min(most, self.memory_budget // one)
        begun = self.memory_budget // (cache.token_bytes * (shortest + 1))
        return max(1, min(most, begun))

    def admission(
        self, cache: KVCache, slots: int, max_completion_length: int, order: Order
    ) -> Admission:
        """Make the admission for a started engine.

        Without settings, more than 256 slots are used only if the cache holds so many completions
        of half the maximum length. Most completions are shorter than that; if they are not, vLLM
        preempts some and computes their cache twice.
        """
        capacity, block = cache.capacity, cache.block
        if (budget := self.memory_budget) is not None and block is not None:
            tokens = budget // cache.token_bytes
            tokens = tokens if capacity is None else min(tokens, capacity)
            if tokens < cache.whole:
                raise UsageError(
                    f"`memory_budget={budget}` bytes{self._each} hold {tokens} tokens of cache. "
                    f"One completion may take {cache.whole} tokens or "
                    f"{cache.whole * cache.token_bytes} bytes, and the engine keeps one block of "
                    f"{block} tokens. Raise the budget, or lower `max_completion_length`."
                )
            quantum = max(block, -(-max_completion_length // QUANTA))
            return Admission(slots, self.refill, order, CacheBudget(tokens, block, quantum))
        if capacity is None:
            return Admission(slots, self.refill, order)
        fit = capacity // cache.whole
        if replace(self, engines=1) == SlotSettings():
            slots = min(slots, max(DEFAULT_SLOTS, 2 * capacity // cache.whole))
        elif fit < slots:
            gib, most = cache.token_bytes / 2**30, fit * self.engines
            advice = f"Use `slots={most}`," if fit else "Not even one fits. Use"
            raise UsageError(
                f"`MicroGroupSampling(slots={slots * self.engines})`: completions of the maximum "
                f"length need {slots * cache.whole * gib:.3g} GiB of key-value cache{self._each}, "
                f"and the engine has {capacity * gib:.3g} GiB. {advice} a lower "
                "`max_completion_length` or `memory_budget`, which runs as many completions as fit "
                "at the moment, or give the engine more memory."
            )
        return Admission(slots, self.refill, order)
