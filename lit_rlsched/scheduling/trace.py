"""Trace of a rollout: which request ran when, and the metrics that follow from it."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_rlsched.types import Event

if TYPE_CHECKING:
    import pyarrow as pa

SPAN_COLUMNS = ("request", "slot", "start", "end", "start_step", "end_step", "tokens")


@dataclass(slots=True)
class Step:
    """What happened in one call of the engine's `step`."""

    start: float
    """Seconds on the engine's clock."""
    end: float
    running: int
    """Requests in the engine."""
    kv_tokens: int
    decode_steps: int = 1
    """A simulated engine may take many at once."""
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    admitted: Sequence[str] = ()
    """Requests that started in this step."""
    events: list[Event] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    """Requests that finished or paused, with the tokens that each drew since it was admitted."""


STEP_COLUMNS = [figure.name for figure in fields(Step) if figure.type in (int, float)]
"""Figures of a step, in order."""
_row = attrgetter(*STEP_COLUMNS)


class RolloutTrace:
    """Records what ran when. Times are seconds on the engine's clock since the first step.

    With several engines, an engine step is one step of each engine that is busy. Their clocks show
    the same time, but these steps may lie anywhere on them.
    """

    def __init__(self, slots: int, dynamic: bool = False, engines: int = 1) -> None:
        self.dynamic = dynamic
        self.engines = engines
        self.peak_running = 0
        columns = [*STEP_COLUMNS, "engine"] if engines > 1 else STEP_COLUMNS
        self.steps: dict[str, list[float]] = {name: [] for name in columns}
        """One row per call of an engine's `step`."""
        self.spans: dict[str, list[Any]] = {name: [] for name in SPAN_COLUMNS}
        """One row each time that a request left the engine: finished, paused or aborted."""
        self.decode_steps = 0
        """Decode steps of the rollout. With several engines, engine steps: the logical clock."""
        self.work_times: list[tuple[float, float]] = []
        """Start and end of each gradient computation during the rollout, by `time.monotonic`, the
        clock of real engines."""
        self.origin: float | None = None
        """When the first step began, in seconds on the engine's clock."""
        self._places = slots // engines
        self._free = [list(range(i * self._places, (i + 1) * self._places)) for i in range(engines)]
        self._live: dict[str, tuple[int, float, int]] = {}
        self._peaks, self._ends, self._last = [0] * engines, [0.0] * engines, [0] * engines

    @property
    def slots(self) -> int:
        """`Q`, the number of slots that metrics refer to."""
        return sum(self._peaks) if self.dynamic else self._places * self.engines

    @property
    def slot_steps(self) -> int:
        return self.slots * self.decode_steps

    @property
    def busy_slot_steps(self) -> int:
        """Slot-steps in which a request ran."""
        columns = zip(self.steps["running"], self.steps["decode_steps"], strict=True)
        return int(sum(running * steps for running, steps in columns))

    @property
    def drawn(self) -> dict[str, int]:
        """Tokens that each request drew."""
        drawn: dict[str, int] = {}
        for request, tokens in zip(self.spans["request"], self.spans["tokens"], strict=True):
            drawn[request] = drawn.get(request, 0) + tokens
        return drawn

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first step to the end of the last."""
        return max(self._ends)

    @property
    def bubble_ratio(self) -> float:
        """Idle slot-time over all slot-time, with the drain at the end (SortedRL, equation 4).

        `sum_k (Q - running_k) * dt_k / (T * Q)`, where `dt_k` reaches from the end of the engine's
        previous step to the end of step k. With several engines, each has its own `Q` and steps,
        and idles from its last step to `T`, the last step of all.
        """
        if not (total := self.seconds * self.slots):
            return 0.0
        slots = self._peaks if self.dynamic else [self._places] * self.engines
        last, idle = [0.0] * self.engines, 0.0
        ends, running = self.steps["end"], self.steps["running"]
        engines = self.steps.get("engine", [0] * len(ends))
        for engine, end, ran in zip(map(int, engines), ends, running, strict=True):
            idle += (slots[engine] - ran) * (end - last[engine])
            last[engine] = end
        drained = (q * (self.seconds - end) for q, end in zip(slots, last, strict=True))
        return (idle + sum(drained)) / total

    @property
    def tokens(self) -> int:
        """Tokens of the requests that have left."""
        return sum(self.spans["tokens"])

    @property
    def work_seconds(self) -> float:
        """Seconds of gradient computation during the rollout."""
        return sum(end - start for start, end in self.work_times)

    @property
    def overlap_seconds(self) -> float:
        """Seconds of gradient computation while an engine was in a step."""
        order = np.argsort(self.steps["start"], kind="stable")
        starts, ends = np.array(self.steps["start"])[order], np.array(self.steps["end"])[order]
        ends = np.maximum.accumulate(ends)  # steps of several engines may overlap
        starts[1:] = np.maximum(starts[1:], ends[:-1])
        if (origin := self.origin) is None:
            return 0.0
        times = ((start - origin, end - origin) for start, end in self.work_times)
        overlaps = (np.minimum(ends, end) - np.maximum(starts, start) for start, end in times)
        return float(sum(overlap.clip(min=0).sum() for overlap in overlaps))

    @property
    def pauses(self) -> int:
        """Number of times that a request left and came back."""
        return len(self.spans["request"]) - len(set(self.spans["request"]))

    def total(self, column: str) -> int:
        """Sum of a column of `steps`."""
        return int(sum(self.steps[column]))

    def admitted(self, request_id: str, now: float, engine: int = 0) -> None:
        """Record that a request took the lowest free slot of an engine."""
        if self.origin is None:
            self.origin = now
        slot = heapq.heappop(self._free[engine])
        self._live[request_id] = (slot, now - self.origin, self.decode_steps)

    def take(self, step: Step) -> None:
        """Record a step of the only engine."""
        self.take_engine_step({0: step})

    def take_engine_step(self, steps: Mapping[int, Step]) -> None:
        """Record an engine step: a step of each busy engine, by its index."""
        if self.origin is None and any(step.admitted for step in steps.values()):
            self.origin = min(step.start for step in steps.values())
        for engine, step in steps.items():
            for request_id in step.admitted:
                self.admitted(request_id, step.start, engine)
        origin = self.origin
        assert origin is not None, "a step before anything was admitted"
        before, ran = self.decode_steps, 0
        self.decode_steps += max(map(attrgetter("decode_steps"), steps.values()))
        for engine, step in steps.items():
            if self._last[engine] < before:  # it had nothing to decode in the steps before
                idle = Step(origin + self._ends[engine], step.start, 0, 0, decode_steps=0)
                self._add_row(engine, idle, origin)
            self._add_row(engine, step, origin)
            self._last[engine] = self.decode_steps
            self._peaks[engine] = max(self._peaks[engine], step.running)
            ran += step.running
            for request_id, tokens in step.left.items():
                self.left(request_id, step.end, tokens)
        self.peak_running = max(self.peak_running, ran)

    def _add_row(self, engine: int, step: Step, origin: float) -> None:
        steps = self.steps  # the columns of `STEP_COLUMNS` come first
        for column, value in zip(steps.values(), _row(step), strict=False):
            column.append(value)
        steps["start"][-1] -= origin
        steps["end"][-1] = self._ends[engine] = step.end - origin
        if self.engines > 1:
            steps["engine"].append(engine)

    def left(self, request_id: str, now: float, tokens: int) -> None:
        """Record that a request left its slot after drawing `tokens`."""
        if request_id not in self._live:
            return  # the step in which it was admitted failed
        assert self.origin is not None, "a request left before anything was admitted"
        slot, start, start_step = self._live.pop(request_id)
        heapq.heappush(self._free[slot // self._places], slot)
        row = (request_id, slot, start, now - self.origin, start_step, self.decode_steps, tokens)
        for column, value in zip(self.spans.values(), row, strict=True):
            column.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the trace of a rollout that is over: numbers, and lists of numbers and names."""
        assert not self._live, "a request still runs"
        return vars(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "RolloutTrace":
        """Create the trace that `state_dict` described."""
        trace = cls.__new__(cls)
        vars(trace).update(state)
        return trace

    def tables(self) -> dict[str, "pa.Table"]:
        """Arrow tables for Parquet: `steps` (windows of them) and `spans`."""
        import pyarrow as pa

        return {"steps": pa.table(self.windows()), "spans": pa.table(self.spans)}

    def windows(self, most: int = 256) -> dict[str, np.ndarray]:
        """Return sums over windows of successive steps of an engine, at most `most` of each engine.

        Columns that a step has once for each decode step, `running` and `kv_tokens`, are multiplied
        by its number of them, so that sums of any windows fit the same linear model of seconds.
        `seconds` are those within steps; the others from `start` to `end` lie between two steps.
        """
        steps = {name: np.asarray(column) for name, column in self.steps.items()}
        ran = steps["decode_steps"] > 0  # not one that stands for a time without requests
        steps = {name: column[ran] for name, column in steps.items()}
        steps["seconds"] = steps["end"] - steps["start"]
        for name in ("running", "kv_tokens"):
            steps[name] = steps[name] * steps["decode_steps"]
        of = steps.pop("engine", np.zeros(len(steps["start"])))
        parts = []
        for engine in range(self.engines):
            rows = np.flatnonzero(of == engine)
            parts += np.array_split(rows, min(most, len(rows))) if len(rows) else []
        windows = {
            name: np.array([column[part].sum() for part in parts], column.dtype)
            for name, column in steps.items()
        }
        for name, place in (("start", 0), ("end", -1)):
            windows[name] = np.array([steps[name][part[place]] for part in parts], float)
        engines = np.array([of[part[0]] for part in parts], int)
        return {"engine": engines, "steps": np.array([*map(len, parts)], int), **windows}
