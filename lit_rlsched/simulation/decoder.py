"""Engines whose requests have known lengths, from one event to the next: a few microseconds each.

The same decisions as `PoolWorker`, `Admission` and `SimulatedEngine` take, without requests and
events; `tests/simulation/test_rounds.py` compares them.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from lit_rlsched.engines.pool_worker import WINDOW
from lit_rlsched.scheduling.admission import Order, Refill
from lit_rlsched.scheduling.routing import moves, route


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a decode step: `base + running * r + kv * tokens in the cache + prefill * new`."""

    base: float = 0.01
    running: float = 5e-5
    """For each request that runs."""
    kv: float = 2e-8
    """For each token in the key-value cache."""
    prefill: float = 0.0
    """For each prompt or prefix token of a new request."""
    cached: float = 0.0
    """Share of the tokens that prefix caching could spare and does spare: prompts of siblings that
    the engine has begun in this round, and all tokens of a request that has paused in it."""


@dataclass(slots=True, eq=False)
class Item:
    """A request, from its submission to its end."""

    id: str
    group: str
    context: int
    """Tokens of its prompt and prefix."""
    prefix: int
    tokens: int
    """Tokens that it will draw."""
    promised: float
    """Tokens that it may draw: the prediction, or up to the limit."""
    limit: int
    """Maximum number of tokens of a completion."""
    key: float = 0.0
    """Lower ones start first."""
    later: bool = False
    """Whether it takes a slot only if no other request waits for one."""
    of: Any = None
    """What it belongs to."""
    cached: bool = False
    """Whether its prompt and prefix need no prefill when it starts."""
    engine: int = -1
    drawn: int = 0
    """Tokens that it has drawn, without those of the visit that goes on."""
    start: int = -1
    """Turn of its slot; -1: it waits."""
    end: int = 0
    """Turn in which it leaves the slot."""
    begun: bool = False
    arrival: int = 0
    """Grows with each time that it joins a queue."""
    submitted: int = 0
    """The same, but for moves to another engine."""
    new: float = 0.0
    """Tokens to prefill in its first step."""
    since: float = 0.0
    """Seconds since the round began, when it got its slot."""
    time: float = 0.0
    """Seconds since the round began, when it ended."""


@dataclass(slots=True)
class _Engine:
    waiting: list[tuple[bool, float, int, Item]] = field(default_factory=list)
    queued: int = 0
    """Requests that wait, without those that were removed from the heap later."""
    later: int = 0
    """Those of them that are `later`."""
    running: int = 0
    kv: int = 0
    new: float = 0.0
    """Tokens to prefill in the next step."""
    begun: set[str] = field(default_factory=set)
    """Groups that have had a slot in this round."""
    at: int = 0
    """Turn up to which seconds are counted."""
    seconds: float = 0.0
    promised: float = 0.0


class Engines:
    """Decodes items with several engines in turns: a turn is one step of each busy engine."""

    def __init__(
        self,
        engines: int = 1,
        slots: int = 256,
        costs: StepCosts = StepCosts(),
        order: Order = "fifo",
        refill: Refill = "continuous",
    ) -> None:
        self.slots = slots
        self._costs = costs
        self._order = order
        self._refill = refill
        self._engines = [_Engine() for _ in range(engines)]
        self._arrivals = 0
        self.log: list[list[tuple[Item, float, float]]] | None = None
        """Times in a slot of each round, with their start and end in seconds, if it is a list."""
        self.start_round()

    def __len__(self) -> int:
        return len(self._engines)

    def start_round(self, ahead: bool = True) -> None:
        """Begin at turn 0; nothing may run. See `Worker.start_round`."""
        self.turn = 0
        self.row_steps = self.peak_kv = self.kv_steps = 0
        self.prefilled = 0.0
        if self.log is not None:
            self.log.append([])
        self._ends: list[tuple[int, int, int, Item]] = []
        self._homes: dict[str, int] = {}
        self._window = WINDOW if ahead else 1
        self._meeting: int | None = 0 if len(self._engines) > 1 else None
        self._dirty = set(range(len(self._engines)))
        for engine in self._engines:
            engine.at, engine.seconds = 0, 0.0
            engine.begun.clear()

    @property
    def seconds(self) -> float:
        """Seconds since the round began, when the last engine is done."""
        for engine in self._engines:
            self._count(engine)
        return max(engine.seconds for engine in self._engines)

    @property
    def busy(self) -> bool:
        return any(engine.running or engine.queued for engine in self._engines)

    def submit(self, items: Iterable[Item]) -> None:
        """Queue items; those of a group go to the engine with the fewest promised tokens."""
        items = [*items]
        if len(self._engines) > 1:
            groups: dict[str, float] = {}
            for item in items:
                if item.group not in self._homes:
                    groups[item.group] = groups.get(item.group, 0.0) + item.promised
            self._homes |= route(groups, [engine.promised for engine in self._engines])
        for item in items:
            item.engine = self._homes.get(item.group, 0)
            self._engines[item.engine].promised += item.promised
            self._push(item)

    def _push(self, item: Item, moved: bool = False) -> None:
        engine = self._engines[item.engine]
        self._arrivals += 1
        item.arrival = self._arrivals
        if not moved:
            item.submitted = self._arrivals
        heapq.heappush(engine.waiting, (item.later, item.key, item.arrival, item))
        engine.queued += 1
        engine.later += item.later
        self._dirty.add(item.engine)

    def step(self) -> list[Item]:
        """Go to the next turn in which items end, and return these; none if nothing is left."""
        while True:
            if self._meeting is not None and self.turn >= self._meeting:
                self._meet()
            for number in sorted(self._dirty):
                self._fill(number)
            self._dirty.clear()
            ends = self._ends
            while ends and ends[0][3].end != ends[0][0]:
                heapq.heappop(ends)  # it was stopped
            if not ends:
                return []
            if self._meeting is not None and self._meeting < ends[0][0]:
                self.turn = self._meeting
                continue
            self.turn = turn = ends[0][0]
            ended = []
            while ends and ends[0][0] == turn:
                item = heapq.heappop(ends)[3]
                if item.end == turn:
                    self._leave(item)
                    if item.drawn < item.tokens:
                        self._push(item)
                    else:
                        self._engines[item.engine].promised -= item.promised
                        ended.append(item)
            if ended:
                return ended

    def stop(self, items: Iterable[Item]) -> None:
        """Remove items, with the tokens that they have drawn."""
        for item in items:
            engine = self._engines[item.engine]
            if item.start >= 0:
                self._leave(item)
            elif item.engine >= 0:
                engine.queued -= 1
                engine.later -= item.later
            engine.promised -= item.promised
            item.engine = -1  # its entries in the heaps are left there
        if not self.busy:
            for engine in self._engines:
                engine.waiting.clear()

    def _leave(self, item: Item) -> None:
        """Take an item out of its slot, in this turn."""
        engine = self._engines[item.engine]
        self._count(engine)
        drawn = self.turn - item.start
        item.drawn += drawn
        engine.running -= 1
        engine.kv -= item.context + item.drawn
        if not drawn:
            engine.new -= item.new
        item.start, item.end, item.time = -1, -1, engine.seconds
        if self.log is not None:
            self.log[-1].append((item, item.since, item.time))
        self._dirty.add(item.engine)

    def _fill(self, number: int) -> None:
        engine = self._engines[number]
        if not engine.queued or (engine.running and self._refill == "rounds"):
            return
        self._count(engine)
        while engine.queued and engine.running < self.slots:
            *_, arrival, item = heapq.heappop(engine.waiting)
            if item.engine != number or item.arrival != arrival:
                continue  # it was stopped, or moved
            tokens = item.tokens - item.drawn
            engine.queued -= 1
            engine.later -= item.later
            engine.running += 1
            have = item.context + item.drawn
            item.new = self._to_prefill(item, engine)
            item.start, item.end, item.begun = self.turn, self.turn + tokens, True
            item.since = engine.seconds
            engine.begun.add(item.group)
            engine.kv += have
            engine.new += item.new
            heapq.heappush(self._ends, (item.end, number, item.arrival, item))

    def _to_prefill(self, item: Item, engine: _Engine) -> float:
        """Tokens that are computed when an item starts."""
        have = item.context + item.drawn
        if item.cached and not item.begun:
            return 0.0
        known = 0
        if item.begun:
            known = have
        elif item.group in engine.begun:
            known = item.context - item.prefix
        return have - self._costs.cached * known

    def _count(self, engine: _Engine) -> None:
        """Count the steps of an engine up to this turn; as many items ran in all of them."""
        steps, engine.at = self.turn - engine.at, self.turn
        if not steps or not engine.running:
            return
        costs, running = self._costs, engine.running
        cached = steps * engine.kv + running * (steps * (steps - 1) // 2)
        engine.seconds += (
            steps * (costs.base + costs.running * running)
            + costs.kv * cached
            + costs.prefill * engine.new
        )
        self.prefilled += engine.new
        engine.new = 0.0
        engine.kv += steps * running
        self.row_steps += steps * running
        self.kv_steps += cached
        self.peak_kv = max(self.peak_kv, engine.kv)

    def _meet(self) -> None:
        """Let all engines wait for each other, and move waiting items to free slots."""
        for engine in self._engines:
            self._count(engine)
        last = max(engine.seconds for engine in self._engines)
        for engine in self._engines:
            engine.seconds = last
        waits = any(engine.queued for engine in self._engines) and self._move()
        self._meeting = self.turn + self._window if waits or self._window == 1 else None

    def _move(self) -> bool:
        """Move waiting items; return whether items still wait."""
        late = all(engine.queued == engine.later for engine in self._engines)
        free = []
        for engine in self._engines:
            slots = self.slots - engine.running
            if engine.running and self._refill == "rounds":
                slots = 0
            free.append(slots - engine.queued + (0 if late else engine.later))
        if max(free) > 0 > min(free):
            waiting = [self._movable(number, late) for number in range(len(free))]
            items = {item.id: item for of in waiting for item in of}
            for name, number in moves(waiting, free).items():
                item = items[name]
                old = self._engines[item.engine]
                old.queued -= 1
                old.later -= item.later
                old.promised -= item.promised
                free[item.engine] += 1
                free[number] -= 1
                item.engine = number
                self._engines[number].promised += item.promised
                self._push(item, moved=True)
        return min(free) < 0 or (any(engine.later for engine in self._engines) and not late)

    def _movable(self, number: int, late: bool) -> Sequence[Any]:
        """Items that wait at an engine and have had no slot in this round, the oldest first."""
        wait = (
            item
            for *_, arrival, item in self._engines[number].waiting
            if item.engine == number and item.arrival == arrival and not item.begun
        )
        return sorted((i for i in wait if late or not i.later), key=attrgetter("submitted"))
