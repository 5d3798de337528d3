"""How long a run still takes."""

import math
import time
from collections import deque
from statistics import fmean

from lightning import Trainer
from lightning.pytorch.callbacks import Timer

RECENT = 20
"""Number of rounds whose mean time is taken for that of a round to come."""


class TimeLeft:
    """Adds up the rounds and validations that are still due, as long as the last ones took.

    The time of a round is from the end of one to the end of the next, without validations: rollout,
    update, checkpoints and whatever else the Trainer does.
    """

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=RECENT)
        self._validation = 0.0
        self._validations = 0
        self._validated = 0.0
        self._ended = self._validation_began = 0.0
        self._start = (0, 0)

    def training_starts(self, trainer: Trainer) -> None:
        """Start the clock; what the last validation took is still known."""
        self._ended, self._validated, self._validations = time.monotonic(), 0.0, 0
        self._start = trainer.current_epoch, trainer.global_step
        self._rounds.clear()

    def validation_starts(self) -> None:
        """Start the clock of a validation."""
        self._validation_began = time.monotonic()

    def validation_ends(self) -> None:
        """Remember what a validation took."""
        self._validation = time.monotonic() - self._validation_began
        self._validated += self._validation
        self._validations += 1

    def round_ends(self) -> None:
        """Remember what a round took."""
        now = time.monotonic()
        self._rounds.append(now - self._ended - self._validated)
        self._ended, self._validated = now, 0.0

    def seconds(self, trainer: Trainer, rounds: int) -> float | None:
        """Return the time left after so many rounds, validations included.

        `None` if the run has ended, has no end, or has had no round yet.
        """
        left = self._rounds_left(trainer, rounds)
        times = [timer.time_remaining() for timer in trainer.callbacks if isinstance(timer, Timer)]  # type: ignore[attr-defined]
        if self._rounds and math.isfinite(left):
            due = self._validations_left(trainer, rounds, left)
            times.append(left * fmean(self._rounds) + due * self._validation)
        found = min((one for one in times if one is not None), default=0.0)
        return found if left > 0 and found > 0 else None

    def _rounds_left(self, trainer: Trainer, rounds: int) -> float:
        """Return the number of rounds to come; infinite if the run has no end."""
        ends = [math.inf]
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            ends.append(trainer.max_epochs - rounds)
        done, steps = rounds - self._start[0], trainer.global_step - self._start[1]
        if trainer.max_steps > 0 and steps:
            ends.append((trainer.max_steps - trainer.global_step) * done / steps)
        return max(0.0, min(ends))

    def _validations_left(self, trainer: Trainer, rounds: int, left: float) -> float:
        every = trainer.check_val_every_n_epoch
        if every is None or trainer.val_check_interval != 1.0:  # then as often as so far
            return left * self._validations / max(1, rounds - self._start[0])
        return (rounds + left) // every - rounds // every
