"""When trainer and engines work, and for whom they wait."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.run.saving.run_folder import folder_of
from lit_rlsched.run.trainer import log_now
from lit_rlsched.scheduling.timeline import Lap
from lit_rlsched.training.round import Round

MICROSECONDS = 1e6


class TraceFile:
    """Appends intervals to a file: a JSON array with a line for each, without its last bracket.

    The format allows the bracket to be missing. Times are microseconds of the run's clock, which a
    resumed run continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lanes: set[str] = set()

    def keep(self, seconds: float) -> None:
        """Drop what came after the run's clock showed `seconds`, and lines cut by a kill."""
        limit, kept = seconds * MICROSECONDS, ["[\n"]
        for line in _lines(self._path):
            event = json.loads(line.rstrip(",\n"))
            if event["ph"] == "M":
                self._lanes.add(event["args"]["name"])
            elif event["ts"] >= limit:
                continue
            elif event["ts"] + event["dur"] > limit:
                event["dur"] = round(limit - event["ts"])
            kept.append(_line(event))
        shortened = self._path.with_suffix(".tmp")
        shortened.parent.mkdir(parents=True, exist_ok=True)
        shortened.write_text("".join(kept), encoding="utf-8")
        os.replace(shortened, self._path)

    def add(self, lap: Lap, at: Callable[[float], float], round: int) -> None:
        """Append a lap."""
        lines = []
        for number, (lane, intervals) in enumerate(lap.lanes.items()):
            of = {"pid": 0, "tid": number}
            if lane not in self._lanes:
                self._lanes.add(lane)
                lines.append(
                    _line({"ph": "M", "name": "thread_name", **of, "args": {"name": lane}})
                )
            for what, start, end, whom in (i[1:] for i in intervals):
                first, last = (int(at(moment) * MICROSECONDS) for moment in (start, end))
                name = what if whom is None else f"{what}: waits for {whom}"
                time = {"ts": first, "dur": last - first}
                args = {"round": round, "waits_for": whom}
                lines.append(_line({"ph": "X", "name": name, **time, **of, "args": args}))
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + ",\n"


def _lines(path: Path) -> list[str]:
    """Return the events of a file that were written whole."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith(",\n")]


class Timeline(RolloutCallback):
    """Record when the trainer and each engine work, and for whom they wait.

    Each round logs `timeline/*` in seconds. They cover the previous update and this round's
    rollout. The run's folder gets `timeline.json`, with all intervals, for https://ui.perfetto.dev
    or `chrome://tracing`, and the picture `waits.png` of the latest rounds.

    `timeline/saved` is an upper bound of the gain where trainer and engine use the same cores.
    Steps that an engine takes beyond the end of a round count as waiting.

    See `docs/explanation/timeline.md`.

    Args:
        pictures_every_n_rounds: Rounds between two pictures; the end of training always gets one.
        rounds_in_picture: Rounds that a picture shows.

    Raises:
        ValueError: a number is out of range.

    Example::

        Trainer(callbacks=[AheadRollout(), Timeline()])
    """

    def __init__(self, pictures_every_n_rounds: int = 20, rounds_in_picture: int = 3) -> None:
        self.pictures_every_n_rounds = pictures_every_n_rounds
        self.rounds_in_picture = rounds_in_picture
        self._laps: list[Lap] = []
        self._file: TraceFile | None = None

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log and write what happened since the rollout before this one."""
        round.metrics |= self._take(trainer)
        if round.ordinal % self.pictures_every_n_rounds == 0:
            self._draw(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log and write what happened since the last rollout."""
        if run_of(trainer, self).timeline is not None and self._laps:
            log_now(trainer, self._take(trainer))
            self._draw(trainer)
        self._laps, self._file = [], None

    def _take(self, trainer: Trainer) -> dict[str, float]:
        run = run_of(trainer, self)
        assert run.timeline is not None and run.timeline.last is not None
        lap, clock = run.timeline.last, run.clock
        self._laps = [*self._laps, lap][-self.rounds_in_picture :]
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if self._file is None:
                self._file = TraceFile(folder_of(trainer) / "timeline.json")
                self._file.keep(clock.before)
            self._file.add(lap, clock.at, run.record.num_rounds)
        return {f"timeline/{name}": value for name, value in lap.totals().items()}

    def _draw(self, trainer: Trainer) -> None:
        from lit_rlsched.callbacks import pictures  # imports matplotlib

        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            figure = pictures.waits(self._laps, run_of(trainer, self).record.rounds[-1])
            pictures.publish({"waits": figure}, trainer)
