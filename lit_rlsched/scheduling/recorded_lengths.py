"""Lengths that are known in advance: recorded ones, and those of a simulation."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from lit_rlsched.scheduling.length_prediction import LengthPredictor, drawn, within_limit
from lit_rlsched.settings import check_finite
from lit_rlsched.types import Request, Sample, stable_hash


class LogNormalLengths:
    """Completion lengths with a long tail: `round(median * exp(sigma * z))`, at least 1.

    Args:
        median: half of the completions are longer than this.
        sigma: standard deviation of the logarithm; about 1 for reasoning models.
        seed: another seed, other lengths.
        key: what a length belongs to. By `id`, a resumed request keeps its length; by `seed`, a
            request drawn again under a new seed gets a new one.
    """

    def __init__(
        self,
        median: float = 64.0,
        sigma: float = 1.0,
        seed: int = 0,
        key: Literal["id", "seed"] = "id",
    ) -> None:
        check_finite(locals())
        if median <= 0 or sigma < 0:
            raise ValueError(f"got median={median}, sigma={sigma}: they must be > 0 and >= 0")
        self.median, self.sigma, self.seed, self.key = median, sigma, seed, key

    def __call__(self, request: Request) -> int:
        u = (stable_hash(self.seed, getattr(request, self.key)) + 0.5) / 2**63
        z = NormalDist().inv_cdf(min(u, 1 - 2**-53))
        return max(1, round(self.median * math.exp(self.sigma * z)))


class TraceLengths:
    """Completion lengths that were recorded, or given one by one.

    Args:
        lengths: lengths by request id, or a plain list of which every id takes one by its hash. A
            path is a Parquet or JSONL file like the spans of a `RolloutTrace`, with columns
            `tokens` and, to replay the lengths request by request, `request`; or the folder
            `traces/` that `RolloutLogger(save_trace=True)` fills, all rounds of it.
    """

    def __init__(self, lengths: str | Path | Mapping[str, int] | Sequence[int]) -> None:
        self.lengths = _read(Path(lengths)) if isinstance(lengths, str | Path) else lengths
        if not self.lengths:
            raise ValueError("a trace needs at least one length")

    def __call__(self, request: Request) -> int:
        if not isinstance(self.lengths, Mapping):
            return self.lengths[stable_hash(request.id) % len(self.lengths)]
        if request.id not in self.lengths:
            raise ValueError(f"request {request.id!r} has no length in the trace")
        return self.lengths[request.id]


class RecordedCompletions:
    """Completions that were drawn before, to be drawn again token by token.

    Args:
        token_ids: the tokens of each completion, the last one included, by request id.
    """

    def __init__(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._token_ids = token_ids

    def __call__(self, request: Request) -> int:
        return len(self.token_ids(request))

    def token_ids(self, request: Request) -> Sequence[int]:
        """The whole completion, whatever the request has as its prefix.

        Raises:
            ValueError: there is none, or it ends within the prefix.
        """
        tokens = self._token_ids.get(request.id, ())
        if not tokens:
            raise ValueError(f"request {request.id!r} has no recorded completion")
        if len(tokens) <= len(request.prefix_ids):
            raise ValueError(
                f"request {request.id!r} has a prefix of {len(request.prefix_ids)} tokens, but its "
                f"recorded completion only {len(tokens)}"
            )
        return tokens


class Oracle(LengthPredictor):
    """Knows the lengths: the bound that a predictor could reach, for simulations and tests.

    Args:
        trace: Lengths by request id (`<group id>/<index>`); or a Parquet or JSONL file with columns
            `request` and `tokens`, like the spans of a `RolloutTrace`; or the folder `traces/` of
            a run with `RolloutLogger(save_trace=True)`, whose completions a run with the same
            settings draws again.

    Raises:
        ValueError: The file does not say which request each length belongs to.
    """

    def __init__(self, trace: str | Path | Mapping[str, int]) -> None:
        if isinstance(trace, str | Path):
            if not Path(trace).exists():
                raise ValueError(
                    f"`Oracle(trace={str(trace)!r})`: there is no such file or folder."
                )
            recorded = TraceLengths(trace).lengths
        else:
            recorded = trace
        if not isinstance(recorded, Mapping) or not recorded:
            raise ValueError(
                f"`Oracle(trace={trace!r:.80})` does not say which request each length belongs to. "
                "Give lengths by request id, or a trace with a column `request`."
            )
        self.lengths = recorded

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Look the lengths up; NaN for a completion that is not in the trace."""
        totals = np.array([self.lengths.get(sample.id, np.nan) for sample in samples], dtype=float)
        return within_limit(samples, totals - drawn(samples)).tolist()


def _read(path: Path) -> Mapping[str, int] | list[int]:
    """Read lengths; the spans of a request that was resumed add up."""
    if path.is_dir():
        table = [row for file in sorted(path.glob("*_spans.parquet")) for row in _rows(file)]
    else:
        table = _rows(path)
    if not table or "tokens" not in table[0]:
        raise ValueError(f"trace {str(path)!r} needs rows with a column `tokens`, as spans have")
    if "request" not in table[0]:
        return [row["tokens"] for row in table]
    totals: Counter[str] = Counter()
    for row in table:
        totals[row["request"]] += row["tokens"]
    return totals


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
