"""What a run has measured since it began, including the runs it was resumed from."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_rlsched.settings import UsageError
from lit_rlsched.text import counted
from lit_rlsched.training.round import Round

CURVES = ("reward", "completions/mean_length", "kl", "entropy", "time/total")
"""Metrics that are kept of every round."""
ROUND, TIME = "rollout/round", "time/total"
"""Columns of `metrics.csv` that tell when a row was written."""
_OWN = ("round", "step")
WHOLE_ROUNDS = 100
"""Newest rounds of which all metrics are kept."""


class RunRecord:
    """Rounds and validations of a run, saved with the data module's state.

    `TrainingRun` adds a round when it commits it, so a round that is drawn again after a kill is
    there once. `Recorder` (`run/trainer.py`) adds what the module logs later.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        """`round` (the first is 1), `step` (the policy version) and the metrics of each round.
        Rounds before the newest `WHOLE_ROUNDS` have only the metrics in `CURVES`."""
        self.validations: list[dict[str, float]] = []
        """`step` and all `val/` metrics of each validation."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds drawn."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    def add_round(self, round: Round) -> None:
        """Add a round that was drawn."""
        self.rounds.append({"round": round.ordinal, "step": round.version})
        self.add_metrics(round.metrics)
        for row in self.rounds[-WHOLE_ROUNDS - 1 : -WHOLE_ROUNDS]:
            for name in row.keys() - {*_OWN, *CURVES}:
                del row[name]

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the last round."""
        if self.rounds:
            self.rounds[-1] |= {k: float(v) for k, v in metrics.items() if k not in _OWN}

    def add_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the `val/` metrics, replacing an earlier validation at the same step."""
        if figures := {k: float(v) for k, v in metrics.items() if k.startswith("val/")}:
            self.validations = [v for v in self.validations if v["step"] != step]
            self.validations.append({"step": step, **figures})

    def result(self, temperature: float) -> str:
        """Return held-out accuracies or reward, at the beginning and at the end."""
        kinds = {
            name: f"as the mean of {counted(int(samples), 'sample')} at temperature {temperature:g}"
            for name in sorted({name for row in self.validations for name in row})
            if (samples := name.removeprefix("val/mean@")).isdecimal()
        }
        kinds["val/greedy_accuracy"] = "of greedy decoding"
        found = {kind: measured(self.validations, name) for name, kind in kinds.items()}
        if not any(found.values()):
            found = {"": measured(self.validations, "val/accuracy")}
        said = (f"{_from_to(points)} {kind}".rstrip() for kind, points in found.items() if points)
        accuracy, rewards = ", ".join(said), measured(self.rounds, "reward")
        if accuracy and self.validations[-1]["step"] > 0:
            return f"held-out accuracy {accuracy}"
        result = f"reward {_from_to(rewards)}" if rewards else "nothing trained"
        return f"held-out accuracy before training {accuracy}, {result}" if accuracy else result

    def state_dict(self) -> dict[str, Any]:
        """Return copies, as primitives only."""
        return {name: [dict(row) for row in rows] for name, rows in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by those of a checkpoint, which may have none."""
        for name, rows in vars(self).items():
            rows[:] = [dict(row) for row in state.get(name, ())]


def measured(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Return `(step, value)` of the rows in which the value is finite."""
    return [(r["step"], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]


def _from_to(points: Sequence[tuple[float, float]]) -> str:
    """Return the last value, after that of the untrained model if it was measured."""
    (step, first), (_, last) = points[0], points[-1]
    return f"{first:.2f} -> {last:.2f}" if step == 0 and len(points) > 1 else f"{last:.2f}"


def read_run(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's `metrics.csv` that belong to rounds and validations.

    A resumed run has several files; what a later one repeats is taken from there.
    """
    files = [*folder.glob("metrics.csv"), *folder.glob("metrics/version_*/metrics.csv")]
    if not files:
        inner = sorted(str(path.parents[2]) for path in folder.glob("*/metrics/*/metrics.csv"))
        use = f"one of the runs in it, such as `{inner[-1]}`" if inner else "the folder of a run"
        raise UsageError(f"`{folder}` is no run: it has no `metrics/*/metrics.csv`. Name {use}.")
    rows: list[dict[str, float]] = []
    for file in sorted(
        files, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-2])]
    ):
        found = []
        with file.open(encoding="utf-8", newline="") as text:
            for cells in csv.DictReader(text):
                with suppress(ValueError, TypeError):  # a kill has cut it
                    row = {name: float(value) for name, value in cells.items() if value}
                    if ROUND in row and TIME in row:
                        found.append(row)
        first = min((row[ROUND] for row in found if "reward" in row), default=math.inf)
        rows = [row for row in rows if row[ROUND] < first] + found
    rounds = [row for row in rows if "reward" in row]
    if not rounds:
        raise UsageError(f"`{folder}` is a run without a round: there is nothing to show yet.")
    for before, row in pairwise(rounds):
        row["seconds"] = row[TIME] - before[TIME]
    return rows
