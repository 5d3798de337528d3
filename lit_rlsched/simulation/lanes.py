"""When the trainer and the engines of a run computed, from its traces."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_rlsched.scheduling.timeline import DECODE, TRAINER, Span, union
from lit_rlsched.scheduling.trace_files import Tables

TRAINS = ("update", "gradients", "verify")
"""What a trainer computes."""


def seconds_beside(starts: np.ndarray, ends: np.ndarray, others: Sequence[Span]) -> np.ndarray:
    """Return the seconds `[N]` of each interval that lie in one of the others."""
    if not others:
        return np.zeros(len(starts))
    edges = np.array(others)
    lasted = edges[:, 1] - edges[:, 0]
    total = np.cumsum(lasted)
    until = np.stack([total - lasted, total], axis=1).ravel()
    return np.interp(ends, edges.ravel(), until) - np.interp(starts, edges.ravel(), until)


@dataclass(slots=True)
class Lanes:
    """Intervals on the run's clock, in order."""

    trainer: list[Span]
    """When the trainer computed."""
    decoding: list[Span]
    """When any engine decoded."""
    idle: dict[int, list[Span]]
    """When each engine did not decode."""
    began: dict[int, float]
    """When the first step of a round began, as far as it is known."""
    apart: bool
    """Whether an engine can decode while the trainer computes."""

    @classmethod
    def of(cls, traces: Tables, intervals: Sequence[Mapping[str, Any]]) -> "Lanes":
        """Read the lanes."""
        trainer, decoding = list[Span](), list[Span]()
        idle: dict[int, list[Span]] = {}
        for row in intervals:
            span = row["start"], row["end"]
            if row["lane"] == TRAINER:
                if row["what"] in TRAINS and not row["waits_for"]:
                    trainer.append(span)
            elif row["what"] == DECODE:
                decoding.append(span)
            elif (number := row["lane"].removeprefix("engine ")).isdigit():
                idle.setdefault(int(number), []).append(span)
        rounds = traces.rows("rounds")
        began = {row["round"]: row["began"] for row in rounds if row.get("began") is not None}
        each = {engine: union(of) for engine, of in idle.items()}
        apart = bool(traces.about.get("own_process", True))
        return cls(union(trainer), union(decoding), each, began, apart)

    def beside(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the share of each window of steps in which the trainer computed, perhaps NaN."""
        origin = np.array([self.began.get(n, math.nan) for n in columns["round"].tolist()])
        starts, ends = columns["start"] + origin, columns["end"] + origin
        if not self.apart:
            return np.zeros(len(starts))
        return seconds_beside(starts, ends, self.trainer) / np.maximum(ends - starts, 1e-9)

    def waits(self, number: int, engine: int, start: float, end: float) -> float:
        """Return the seconds in which an engine did not decode, between two moments of a round."""
        if (at := self.began.get(number)) is None:
            return 0.0
        edges = np.array([start + at]), np.array([end + at])
        return float(seconds_beside(*edges, self.idle.get(engine, []))[0])
