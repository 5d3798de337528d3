"""How long a decode step takes, compared with earlier ones."""

from collections import defaultdict
from statistics import median

from lit_rlsched.scheduling.trace import RolloutTrace

LEAST_STEPS = 10
"""Steps of one kind from which on they are compared."""


class StepSpeed:
    """Compares the decode steps of each rollout with the fastest ones of their kind so far.

    Steps are of one kind if as many requests run, with as much in the cache, both up to a factor of
    two. Steps that compute prompts are left out.
    """

    def __init__(self) -> None:
        self._least: dict[tuple[int, int], float] = {}
        """Least median of the seconds of a step, by its kind."""

    def times_as_long(self, trace: RolloutTrace) -> float | None:
        """Return how many times as long its steps take; `None` without any to compare with."""
        names = ("running", "kv_tokens", "prefill_tokens", "decode_steps")
        kinds: dict[tuple[int, int], list[float]] = defaultdict(list)
        for running, kv, prefill, steps, start, end in zip(
            *(trace.steps[name] for name in (*names, "start", "end")), strict=True
        ):
            if running and steps and not prefill:
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
