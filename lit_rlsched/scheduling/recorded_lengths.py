"""Completion lengths known in advance: drawn from a distribution, or recorded."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

from lit_rlsched.scheduling.length_prediction import LengthPredictor, drawn, within_limit
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError, check_ranges
from lit_rlsched.types import Request, Sample, stable_hash


class LogNormalLengths:
    """Log-normal completion lengths: `round(median * exp(sigma * z))`, at least 1."""

    def __init__(
        self,
        median: float = 64.0,
        sigma: float = 1.0,
        seed: int = 0,
        key: Literal["id", "seed"] = "id",
    ) -> None:
        check_ranges("LogNormalLengths", locals())
        self.median, self.sigma, self.seed, self.key = median, sigma, seed, key

    def __call__(self, request: Request) -> int:
        u = (stable_hash(self.seed, getattr(request, self.key)) + 0.5) / 2**63
        z = NormalDist().inv_cdf(min(u, 1 - 2**-53))
        return max(1, round(self.median * math.exp(self.sigma * z)))


class TraceLengths:
    """Recorded completion lengths: given, or the folder of a run with traces."""

    def __init__(self, lengths: str | Path | Mapping[str, int] | Sequence[int]) -> None:
        self.lengths = _read(lengths) if isinstance(lengths, str | Path) else lengths
        if not self.lengths:
            raise UsageError("a trace needs at least one length")

    def __call__(self, request: Request) -> int:
        if not isinstance(self.lengths, Mapping):
            return self.lengths[stable_hash(request.id) % len(self.lengths)]
        if request.id not in self.lengths:
            raise UsageError(f"request {request.id!r} has no length in the trace")
        return self.lengths[request.id]


class Oracle(LengthPredictor):
    """Knows all lengths: the bound of what a predictor can achieve, for simulations and tests.

    Args:
        trace: Lengths by request id (`<group id>/<index>`), or the folder of a run with traces. A
            run with the same settings draws the same lengths again.

    Raises:
        UsageError: The folder has no traces, or the lengths name no requests.
    """

    def __init__(self, trace: str | Path | Mapping[str, int]) -> None:
        recorded = TraceLengths(trace).lengths if isinstance(trace, str | Path) else trace
        if not isinstance(recorded, Mapping) or not recorded:
            raise UsageError(
                f"`Oracle(trace={trace!r:.80})` does not name the request of each length. Give "
                "lengths by request id, or the folder of a run with traces."
            )
        self.lengths = recorded

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Look the lengths up; NaN for a completion that is not in the trace."""
        totals = np.array([self.lengths.get(sample.id, np.nan) for sample in samples])
        return within_limit(samples, totals - drawn(samples)).tolist()


def _read(folder: str | Path) -> Mapping[str, int]:
    """Read the lengths of a run; the spans of a resumed request add up."""
    totals: Counter[str] = Counter()
    for row in Traces(folder).rows("spans"):
        totals[row["request"]] += row["tokens"]
    return totals
