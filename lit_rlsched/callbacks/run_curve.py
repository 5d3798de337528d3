"""What a run has measured in each round, its validations and its time, from its beginning."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.run.saving.run_folder import name_of
from lit_rlsched.run.trainer import Clock
from lit_rlsched.text import counted
from lit_rlsched.training.round import Round

STEP_METRICS = ("kl", "entropy")
"""Metrics of the optimizer steps that the curve keeps, if the module logs them."""


class RunCurve:
    """Rounds, validations and time of a run, including the runs it was resumed from."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        """`round`, `step`, `reward` and `length` (mean tokens of a completion) of each round, and
        the `STEP_METRICS` of its last optimizer step."""
        self.validations: list[dict[str, float]] = []
        """`step` and all `val/` metrics of each validation."""
        self.last: Round | None = None
        """The last round drawn since `start`."""
        self.clock = Clock()

    def start(self) -> None:
        """Start the clock."""
        self.clock.start()
        self.last = None

    def add_round(self, round: Round) -> None:
        """Add a round that was drawn."""
        self.last = round
        length = round.metrics.get("completions/mean_length", math.nan)
        row = {"reward": round.metrics["reward"], "length": length}
        self.rounds.append({"round": round.ordinal, "step": round.version, **row})

    def add_update(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of the last round's optimizer steps."""
        if self.rounds:
            self.rounds[-1] |= {k: float(metrics[k]) for k in STEP_METRICS if k in metrics}

    def add_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the `val/` metrics, replacing an earlier validation at the same step."""
        if figures := {k: float(v) for k, v in metrics.items() if k.startswith("val/")}:
            self.validations = [v for v in self.validations if v["step"] != step]
            self.validations.append({"step": step, **figures})

    def effort(self, completions: int) -> str:
        """Return rounds, completions and seconds of the run as text."""
        rounds = int(self.rounds[-1]["round"]) if self.rounds else 0
        return (
            f"{rounds} {'round' if rounds == 1 else 'rounds'}, {completions} completions, "
            f"{self.clock.seconds:.0f} s"
        )

    def summary(self, folder: Path, took: str, temperature: float) -> str:
        """Return the run in one line; a run in `runs/countdown/version_3` is called `countdown`.

        Args:
            folder: The run's folder.
            took: What `effort` returns.
            temperature: That of the sampled held-out completions.
        """
        result = self.result(temperature)
        return f"{name_of(folder)}: {result} ({took}); pictures and metrics in {folder}"

    def result(self, temperature: float) -> str:
        """Return held-out accuracies or reward, at the beginning and at the end."""
        accuracy = self._accuracy(temperature)
        rewards = measured(self.rounds, "reward")
        if accuracy and self.validations[-1]["step"] > 0:
            return f"held-out accuracy {accuracy}"
        result = f"reward {from_to(rewards)}" if rewards else "nothing trained"
        if accuracy:
            result = f"held-out accuracy before training {accuracy}, {result}"
        return result

    def _accuracy(self, temperature: float) -> str:
        """Return the accuracies, and of which completions; empty if none was measured."""
        kinds = {
            name: f"as the mean of {counted(int(samples), 'sample')} at temperature {temperature:g}"
            for name in sorted({name for row in self.validations for name in row})
            if (samples := name.removeprefix("val/mean@")).isdecimal()
        }
        kinds["val/greedy_accuracy"] = "of greedy decoding"
        found = {kind: measured(self.validations, name) for name, kind in kinds.items()}
        if not any(found.values()):
            found = {"": measured(self.validations, "val/accuracy")}
        said = (f"{from_to(points)} {kind}".rstrip() for kind, points in found.items() if points)
        return ", ".join(said)

    def state_dict(self) -> dict[str, Any]:
        """Return the curve and its time."""
        return {
            "rounds": [dict(r) for r in self.rounds],
            "validations": [dict(v) for v in self.validations],
            "seconds": self.clock.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the curve of a resumed run."""
        self.rounds = state_dict["rounds"]
        self.validations = state_dict["validations"]
        self.clock.before = state_dict["seconds"]


def measured(
    rows: Sequence[Mapping[str, float]], name: str, at: str = "step"
) -> list[tuple[float, float]]:
    """Return `(step, value)` of the rows in which the value is finite."""
    return [(r[at], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]


def from_to(points: Sequence[tuple[float, float]]) -> str:
    """Return the last value, after that of the untrained model if it was measured."""
    (step, first), (_, last) = points[0], points[-1]
    return f"{first:.2f} -> {last:.2f}" if step == 0 and len(points) > 1 else f"{last:.2f}"
