"""Trace of a rollout: which request ran when, and the metrics that follow from it."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_rlsched.types import Event

if TYPE_CHECKING:
    import pyarrow as pa

STEP_COLUMNS = (
    "start",
    "end",
    "running",
    "kv_tokens",
    "decode_steps",
    "prefill_tokens",
    "cached_tokens",
    "preemptions",
)
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


class RolloutTrace:
    """Records what ran when. Times are seconds on the engine's clock since the first step.

    Args:
        slots: Slots of the engine.
        dynamic: Whether memory decides how many slots are in use. Metrics then refer to the largest
            number of requests that ever ran at once.
    """

    def __init__(self, slots: int, dynamic: bool = False) -> None:
        self.dynamic = dynamic
        self.peak_running = 0
        self.steps: dict[str, list[float]] = {name: [] for name in STEP_COLUMNS}
        """One row per call of the engine's `step`."""
        self.spans: dict[str, list[Any]] = {name: [] for name in SPAN_COLUMNS}
        """One row each time that a request left the engine: finished, paused or aborted."""
        self.decode_steps = 0
        self.work: list[tuple[float, float]] = []
        """Start and end of each gradient computation during the rollout."""
        self._origin: float | None = None
        self._places = slots
        self._free = list(range(slots))
        self._live: dict[str, tuple[int, float, int]] = {}

    @property
    def slots(self) -> int:
        """`Q`, the number of slots that metrics refer to."""
        return self.peak_running if self.dynamic else self._places

    @property
    def slot_steps(self) -> int:
        return self.slots * self.decode_steps

    @property
    def busy_slot_steps(self) -> int:
        """Slot-steps in which a request ran."""
        columns = zip(self.steps["running"], self.steps["decode_steps"], strict=True)
        return int(sum(running * steps for running, steps in columns))

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first step to the end of the last."""
        return self.steps["end"][-1] if self.steps["end"] else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle slot-time over all slot-time, with the drain at the end (SortedRL, equation 4).

        `sum_k (Q - running_k) * dt_k / (T * Q)`, where `dt_k` reaches from the end of the previous
        step to the end of step k.
        """
        total, last = 0.0, 0.0
        for end, running in zip(self.steps["end"], self.steps["running"], strict=True):
            total += (self.slots - running) * (end - last)
            last = end
        return total / (last * self.slots) if last else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the requests that have left."""
        return sum(self.spans["tokens"])

    @property
    def work_seconds(self) -> float:
        """Seconds of gradient computation during the rollout."""
        return sum(end - start for start, end in self.work)

    @property
    def overlap_seconds(self) -> float:
        """Seconds of gradient computation while the engine was in a step."""
        starts, ends = np.array(self.steps["start"]), np.array(self.steps["end"])
        overlaps = (np.minimum(ends, end) - np.maximum(starts, start) for start, end in self.work)
        return float(sum(overlap.clip(min=0).sum() for overlap in overlaps))

    @property
    def pauses(self) -> int:
        """Number of times that a request left and came back."""
        return len(self.spans["request"]) - len(set(self.spans["request"]))

    def total(self, column: str) -> int:
        """Sum of a column of `steps`."""
        return int(sum(self.steps[column]))

    def admitted(self, request_id: str, now: float) -> None:
        """Record that a request took the lowest free slot."""
        if self._origin is None:
            self._origin = now
        slot = heapq.heappop(self._free)
        self._live[request_id] = (slot, now - self._origin, self.decode_steps)

    def take(self, step: Step) -> None:
        for request_id in step.admitted:
            self.admitted(request_id, step.start)
        assert self._origin is not None, "a step before anything was admitted"
        self.decode_steps += step.decode_steps
        self.peak_running = max(self.peak_running, step.running)
        for name, column in self.steps.items():
            column.append(getattr(step, name))
        self.steps["start"][-1] -= self._origin
        self.steps["end"][-1] -= self._origin
        for request_id, tokens in step.left.items():
            self.left(request_id, step.end, tokens)

    def worked(self, start: float, end: float) -> None:
        """Record a gradient computation; times are `time.monotonic`, the clock of real engines."""
        if self._origin is not None:  # else nothing needed to be decoded so far
            self.work.append((start - self._origin, end - self._origin))

    def left(self, request_id: str, now: float, tokens: int) -> None:
        """Record that a request left its slot after drawing `tokens`."""
        if request_id not in self._live:
            return  # the step in which it was admitted failed
        assert self._origin is not None, "a request left before anything was admitted"
        slot, start, start_step = self._live.pop(request_id)
        heapq.heappush(self._free, slot)
        row = (request_id, slot, start, now - self._origin, start_step, self.decode_steps, tokens)
        for column, value in zip(self.spans.values(), row, strict=True):
            column.append(value)

    def tables(self) -> dict[str, "pa.Table"]:
        """Arrow tables for Parquet: `steps`, `spans` and, if there is any, `work`."""
        import pyarrow as pa

        tables = {"steps": pa.table(self.steps), "spans": pa.table(self.spans)}
        if self.work:
            start, end = zip(*self.work, strict=True)
            tables["work"] = pa.table({"start": start, "end": end})
        return tables
