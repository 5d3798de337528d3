"""Where the trainer and a rollout beside it meet to change the weights."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from lit_rlsched.engines.rollout_worker import Worker
from lit_rlsched.scheduling.in_flight_updates import OWNER, Pace
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError

POLL = 0.5
"""Seconds between two looks at what else may end a wait."""


class Meetings:
    """Stops a rollout in a thread of its own at multiples of `turns`, for the trainer.

    With `pace="turns"` the rollout waits there for the trainer, so the turn of a token alone
    decides which weights draw it. With `pace="free"` it stops only where the trainer already waits,
    and `switches` records those turns.
    """

    def __init__(self, pace: Pace, turns: int, replay: Collection[int] | None = None) -> None:
        self._pace, self._turns, self._replay = pace, turns, replay
        self._next = self._turn = 0
        self._changed = threading.Condition()
        self._here = self._awaited = self._over = self._released = False
        self.switches: list[int] = []
        """Turns at which the weights have changed."""
        self.rollout_seconds = 0.0
        """How long the rollout has waited for the trainer."""
        self._trainer_seconds = 0.0
        self._came: float | None = None
        """When the trainer began to wait."""

    @property
    def trainer_seconds(self) -> float:
        """How long the trainer has waited for the rollout."""
        came = self._came
        return self._trainer_seconds + (0.0 if came is None else time.perf_counter() - came)

    def before_step(self, worker: Worker, heed: Callable[[], None]) -> None:
        """Called by the rollout before each step; waits at the turns of meetings."""
        turn = worker.trace.decode_steps
        if turn < self._next:
            return
        if turn:
            began = time.perf_counter()
            self._meet(turn, heed)
            self.rollout_seconds += time.perf_counter() - began
        self._next = turn + self._turns
        worker.allow(self._turns)

    def _meet(self, turn: int, heed: Callable[[], None]) -> None:
        with self._changed:
            self._here, self._turn = self._stops(turn), turn
            self._changed.notify_all()
            try:
                while self._here and (self._awaited or not self._released):
                    self._changed.wait(POLL)
                    heed()
            finally:
                self._here = False

    def _stops(self, turn: int) -> bool:
        if self._replay is not None:
            return turn in self._replay
        return self._awaited or self._pace == "turns"

    @contextmanager
    def trainer(self) -> Iterator[bool]:
        """Wait until the rollout has stopped, and let it go on after the block."""
        self._came = time.perf_counter()
        try:
            with self._changed:
                self._awaited = True
                while not (self._here or self._over):
                    self._changed.wait(POLL)
                met = self._here
            self._trainer_seconds, self._came = self.trainer_seconds, None
            yield met
            if met:
                self.switches.append(self._turn)
        finally:
            with self._changed:
                self._awaited = self._here = False
                self._changed.notify_all()

    def release(self) -> None:
        """End the rollout's waits, as its weights do not change any more."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def end(self) -> None:
        """Called when the rollout is over."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


def recorded_turns(folder: str | None) -> dict[int, set[int]] | None:
    """Read at which turns weights changed, by the version that each rollout began with."""
    if folder is None:
        return None
    turns: dict[int, set[int]] = {}
    for row in Traces(folder).rows("updates"):
        turns.setdefault(row["began"], set()).add(row["turn"])
    if not turns:
        raise UsageError(
            f"`{OWNER}(replay={folder!r})`: the weights of that run did not change during a "
            "rollout. Give the folder of a run with `pace='free'` and `RolloutLogger`."
        )
    return turns
