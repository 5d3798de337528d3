"""How a run went so far: reward, held-out figures, time."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.training.round import Round


class RunCurve:
    """The figures of a run from its beginning, that of what was resumed from included."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        """`round`, `step` and `reward` of each round since the run began."""
        self.validations: list[dict[str, float]] = []
        """`step` and every `val/` figure of each validation, the one before training included."""
        self.last: Round | None = None
        """The round drawn last since the clock was started."""
        self._seconds = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Time in `fit` since the run began."""
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def start(self) -> None:
        """Start the clock."""
        self._started, self.last = time.monotonic(), None

    def stop(self) -> None:
        """Stop the clock."""
        self._seconds, self._started = self.seconds, None

    def add_round(self, round: Round) -> None:
        """Take up a round's reward."""
        self.last, reward = round, round.metrics["reward"]
        self.rounds.append({"round": round.number, "step": round.version, "reward": reward})

    def add_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take up what is measured under `val/`, in place of others of the same step."""
        if figures := {k: float(v) for k, v in metrics.items() if k.startswith("val/")}:
            self.validations = [v for v in self.validations if v["step"] != step]
            self.validations.append({"step": step, **figures})

    def effort(self, completions: int) -> str:
        """What the run took, in words."""
        rounds = int(self.rounds[-1]["round"]) + 1 if self.rounds else 0
        return (
            f"{rounds} {'round' if rounds == 1 else 'rounds'}, {completions} completions, "
            f"{self.seconds:.0f} s"
        )

    def summary(self, folder: Path, took: str) -> str:
        """The run in one line: `runs/countdown/version_3` is called `countdown`."""
        path = folder.resolve()
        name = path.parent.name if path.name.startswith("version_") else path.name
        return f"{name}: {self.result()} ({took}); pictures and metrics in {folder}"

    def result(self) -> str:
        """What came of it, in words."""
        measured = _measured(self.validations, "val/accuracy")
        rewards = _measured(self.rounds, "reward")
        if measured and measured[-1][0] > 0:
            return f"held-out accuracy {_from_to(measured)}"
        result = f"reward {_from_to(rewards)}" if rewards else "nothing trained"
        if measured:
            result = f"held-out accuracy {measured[0][1]:.2f} before training, {result}"
        return result

    def state_dict(self) -> dict[str, Any]:
        """The curve and how long it took."""
        return {
            "rounds": [dict(r) for r in self.rounds],
            "validations": [dict(v) for v in self.validations],
            "seconds": self.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the curve of the run that is resumed."""
        self.rounds = state_dict["rounds"]
        self.validations = state_dict["validations"]
        self._seconds = state_dict["seconds"]


def _measured(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(r["step"], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]


def _from_to(measured: Sequence[tuple[float, float]]) -> str:
    """From the untrained model's figure to the last; the last alone where that was not measured."""
    (step, first), (_, last) = measured[0], measured[-1]
    return f"{first:.2f} -> {last:.2f}" if step == 0 and len(measured) > 1 else f"{last:.2f}"
