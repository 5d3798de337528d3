"""Every event of a rollout, column by column, and the figures that follow from it."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

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
    """What happened each time the engine was stepped."""

    start: float
    """Seconds on the engine's clock."""
    end: float
    running: int
    """Requests in the engine."""
    kv_tokens: int
    decode_steps: int = 1
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    admitted: Sequence[str] = ()
    """Requests that came in before it."""
    events: list[Event] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    """Requests that left after it, each with the tokens it drew in its stay."""


class RolloutTrace:
    """Records what ran when. Times are seconds on the engine's clock, counted from the first step.

    Args:
        slots: The places in the engine's running batch.
        dynamic: Whether memory decides how many of them there are at a time. `Q` is then the most
            that ever ran at once.
    """

    def __init__(self, slots: int, dynamic: bool = False) -> None:
        self.dynamic = dynamic
        self.peak_running = 0
        self.steps: dict[str, list[float]] = {name: [] for name in STEP_COLUMNS}
        """One row for each time the engine was stepped; a simulated one may jump over steps."""
        self.spans: dict[str, list[Any]] = {name: [] for name in SPAN_COLUMNS}
        """One row for each stay of a request: it left finished, paused or aborted."""
        self.decode_steps = 0
        """Decode steps the engine took."""
        self.work: list[tuple[float, float]] = []
        """When the trainer computed gradients meanwhile: from, to."""
        self._origin: float | None = None
        self._places = slots
        self._free = list(range(slots))
        self._live: dict[str, tuple[int, float, int]] = {}

    @property
    def slots(self) -> int:
        """`Q`, the places that all figures are relative to."""
        return self.peak_running if self.dynamic else self._places

    @property
    def slot_steps(self) -> int:
        """Slot places over all steps, used or idle: `Q * decode_steps`."""
        return self.slots * self.decode_steps

    @property
    def busy_slot_steps(self) -> int:
        """Slot places in which a request ran."""
        columns = zip(self.steps["running"], self.steps["decode_steps"], strict=True)
        return int(sum(running * steps for running, steps in columns))

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.steps["end"][-1] if self.steps["end"] else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle slot-time over all slot-time, the drain at the end included (SortedRL, eq. 4).

        `sum_k (Q - running_k) * dt_k / (T * Q)`, where `dt_k` reaches from the end of the last step
        to the end of this one.
        """
        total, last = 0.0, 0.0
        for end, running in zip(self.steps["end"], self.steps["running"], strict=True):
            total += (self.slots - running) * (end - last)
            last = end
        return total / (last * self.slots) if last else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the requests that left."""
        return sum(self.spans["tokens"])

    @property
    def work_seconds(self) -> float:
        """Seconds in which the trainer computed gradients before the rollout was over."""
        return sum(end - start for start, end in self.work)

    @property
    def overlap_seconds(self) -> float:
        """Seconds in which the trainer computed gradients while the engine was in a step."""
        total, steps = 0.0, list(zip(self.steps["start"], self.steps["end"], strict=True))
        for begin, end in self.work:
            first = bisect_left(steps, begin, key=lambda step: step[1])
            for start, stop in islice(steps, first, None):
                if start >= end:
                    break
                total += min(end, stop) - max(begin, start)
        return total

    @property
    def pauses(self) -> int:
        """Times a request left and came back."""
        return len(self.spans["request"]) - len(set(self.spans["request"]))

    def total(self, column: str) -> int:
        """Sum over the steps of one of the columns that count."""
        return int(sum(self.steps[column]))

    def admitted(self, request_id: str, now: float) -> None:
        """A request takes the lowest free slot."""
        if self._origin is None:
            self._origin = now
        slot = heapq.heappop(self._free)
        self._live[request_id] = (slot, now - self._origin, self.decode_steps)

    def take(self, step: Step) -> None:
        """The engine was stepped."""
        for request_id in step.admitted:
            self.admitted(request_id, step.start)
        assert self._origin is not None, "a step before anything was admitted"
        self.decode_steps += step.decode_steps
        self.peak_running = max(self.peak_running, step.running)
        row = (
            step.start - self._origin,
            step.end - self._origin,
            step.running,
            step.kv_tokens,
            step.decode_steps,
            step.prefill_tokens,
            step.cached_tokens,
            step.preemptions,
        )
        for column, value in zip(self.steps.values(), row, strict=True):  # as in STEP_COLUMNS
            column.append(value)
        for request_id, tokens in step.left.items():
            self.left(request_id, step.end, tokens)

    def worked(self, start: float, end: float) -> None:
        """The trainer computed gradients; `time.monotonic`, as the clocks of real engines."""
        if self._origin is None:
            return  # all of the round was there before it
        self.work.append((start - self._origin, end - self._origin))

    def left(self, request_id: str, now: float, tokens: int) -> None:
        """A request finished or was aborted, and its slot is free."""
        if request_id not in self._live:
            return  # the step that it came in with failed
        assert self._origin is not None, "a request left before anything was admitted"
        slot, start, start_step = self._live.pop(request_id)
        heapq.heappush(self._free, slot)
        row = (request_id, slot, start, now - self._origin, start_step, self.decode_steps, tokens)
        for column, value in zip(self.spans.values(), row, strict=True):
            column.append(value)

    def tables(self) -> dict[str, "pa.Table"]:
        """`steps`, `spans` and, where there is any, `work` as Arrow tables, for Parquet."""
        import pyarrow as pa

        tables = {"steps": pa.table(self.steps), "spans": pa.table(self.spans)}
        if self.work:
            start, end = zip(*self.work, strict=True)
            tables["work"] = pa.table({"start": start, "end": end})
        return tables
