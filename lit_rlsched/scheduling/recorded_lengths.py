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
    """Recorded completion lengths."""

    def __init__(self, lengths: str | Path | Mapping[str, int] | Sequence[int]) -> None:
        self.lengths = _read(Path(lengths)) if isinstance(lengths, str | Path) else lengths
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
        trace: Lengths by request id (`<group id>/<index>`); or a path as in `TraceLengths`, with
            the column `request`. A run with the same settings draws the same lengths again.

    Raises:
        UsageError: The file does not exist, or does not name the request of each length.
    """

    def __init__(self, trace: str | Path | Mapping[str, int]) -> None:
        recorded = TraceLengths(trace).lengths if isinstance(trace, str | Path) else trace
        if not isinstance(recorded, Mapping) or not recorded:
            raise UsageError(
                f"`Oracle(trace={trace!r:.80})` does not name the request of each length. Give "
                "lengths by request id, or a trace with a column `request`."
            )
        self.lengths = recorded

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Look the lengths up; NaN for a completion that is not in the trace."""
        totals = np.array([self.lengths.get(sample.id, np.nan) for sample in samples])
        return within_limit(samples, totals - drawn(samples)).tolist()


def _read(path: Path) -> Mapping[str, int] | list[int]:
    """Read lengths; the spans of a resumed request add up."""
    import pyarrow as pa
    from pyarrow import json, parquet

    read = parquet.read_table if path.suffix == ".parquet" else json.read_json
    if not path.exists():
        raise UsageError(
            f"trace {str(path)!r}: there is no such file or folder. Give the path of a trace."
        )
    try:
        table = Traces(path).rows("spans") if path.is_dir() else read(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"trace {str(path)!r} cannot be read as rows ({error})") from error
    names = {name for row in table for name in row} & {"request"} | {"tokens"}
    for number, row in enumerate(table or [{}]):
        if lacking := [name for name in sorted(names) if row.get(name) is None]:
            raise UsageError(
                f"trace {str(path)!r} needs rows with a column `{lacking[0]}`, as spans have; row "
                f"{number} (the first is 0) has none"
            )
    if "request" not in names:
        return [row["tokens"] for row in table]
    totals: Counter[str] = Counter()
    for row in table:
        totals[row["request"]] += row["tokens"]
    return totals
