"""How long a decode step takes, fitted to the steps of a rollout or compared with earlier ones."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import numpy as np

from lit_rlsched.scheduling.trace import RolloutTrace

LEAST_STEPS = 10
"""Steps with draft tokens from which on times are fitted, or of one kind that are compared."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """`seconds = base + request * running + cached * kv_tokens + draft * draft_tokens`."""

    base: float
    request: float
    cached: float
    draft: float

    @classmethod
    def fit(cls, trace: RolloutTrace) -> "StepTimes | None":
        """Fit the steps of a rollout that compute no prompt, by least squares."""
        steps = {name: np.array(column, dtype=float) for name, column in trace.steps.items()}
        plain = (steps["prefill_tokens"] == 0) & (steps["running"] > 0)
        steps = {name: column[plain] for name, column in steps.items()}
        if (steps["proposed"] > 0).sum() < LEAST_STEPS:
            return None
        columns = [steps[name] for name in ("running", "kv_tokens", "proposed")]
        scales = [max(1.0, column.max()) for column in columns]
        scaled = (c / scale for c, scale in zip(columns, scales, strict=True))
        table = np.stack([np.ones_like(steps["end"]), *scaled], axis=1)
        if np.linalg.matrix_rank(table) == np.linalg.matrix_rank(table[:, :-1]):
            return None
        seconds = (steps["end"] - steps["start"]) / np.maximum(1, steps["decode_steps"])
        fitted = np.linalg.lstsq(table, seconds, rcond=None)[0]
        return cls(*(fitted / [1.0, *scales]).tolist())

    def saved(self, trace: RolloutTrace) -> float:
        """Return the seconds that draft tokens have saved.

        Without them there would have been `trace.plain_steps` decode steps, and each draft token
        that was drawn would have taken a row of its own in one of them.
        """
        steps = {name: np.array(trace.steps[name]) for name in ("running", "kv_tokens", "proposed")}
        drafted = steps["proposed"] > 0
        context = steps["kv_tokens"][drafted].sum() / steps["running"][drafted].sum()
        fewer = self.base * (trace.plain_steps - trace.decode_steps)
        rows = (self.request + self.cached * context) * trace.total("accepted")
        return float(fewer + rows - self.draft * trace.total("proposed"))


class StepSpeed:
    """Compares the decode steps of each rollout with the fastest ones of their kind so far.

    Steps are of one kind if as many requests run, with as much in the cache, both up to a factor of
    two. Steps that compute prompts or draft tokens are left out.
    """

    def __init__(self) -> None:
        self._least: dict[tuple[int, int], float] = {}
        """Least median of the seconds of a step, by its kind."""

    def times_as_long(self, trace: RolloutTrace) -> float | None:
        """Return how many times as long its steps take; `None` without any to compare with."""
        names = ("running", "kv_tokens", "prefill_tokens", "proposed", "decode_steps")
        kinds: dict[tuple[int, int], list[float]] = defaultdict(list)
        for running, kv, prefill, proposed, steps, start, end in zip(
            *(trace.steps[name] for name in (*names, "start", "end")), strict=True
        ):
            if running and steps and not prefill and not proposed:
                kind = int(running).bit_length(), int(kv).bit_length()
                kinds[kind].append((end - start) / steps)
        now = least = 0.0
        for kind, seconds in kinds.items():
            if len(seconds) >= LEAST_STEPS:
                middle = median(seconds)
                if kind in self._least:
                    now += len(seconds) * middle
                    least += len(seconds) * self._least[kind]
                self._least[kind] = min(middle, self._least.get(kind, middle))
        return now / least if least else None
