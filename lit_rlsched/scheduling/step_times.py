"""How long a decode step takes, fitted to the steps of a rollout."""

from dataclasses import dataclass

import numpy as np

from lit_rlsched.scheduling.trace import RolloutTrace

LEAST_STEPS = 10
"""Steps with draft tokens from which on times are fitted."""


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
