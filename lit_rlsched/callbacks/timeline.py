"""When trainer and engines work, and for whom they wait."""

from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.callbacks.trace_file import TraceFile
from lit_rlsched.logs import log_now
from lit_rlsched.run_folder import folder_of
from lit_rlsched.scheduling.lanes import TRAINER
from lit_rlsched.scheduling.timeline import Lap
from lit_rlsched.settings import check_count
from lit_rlsched.training.round import Round


class Timeline(RolloutCallback):
    """Record when the trainer and each engine work, and for whom they wait.

    Each round logs totals in seconds, `timeline/*`: of the time from the end of the rollout before
    to the end of its own, so of the update before it and of its rollout. `timeline/saved` is the
    time in which the trainer works and an engine decodes, which a synchronous run would spend on
    one after the other. It is an upper bound of the gain where both use the same cores, as each is
    slower beside the other.

    The run's folder gets `timeline.json`, with all intervals, which https://ui.perfetto.dev and
    `chrome://tracing` show, and the picture `waits.png` of the latest rounds, with the ages of the
    tokens that the last one trains on. A resumed run continues the file. Engines on other nodes
    tell the time of the trainer's clock. What an engine decodes while the trainer ends a round,
    beyond the steps that were taken of it, counts as waiting.

    Args:
        pictures_every_n_rounds: Rounds between two pictures; the end of training always gets one.
        rounds_in_picture: Rounds that a picture shows.

    Raises:
        ValueError: a number is out of range.

    Example::

        Trainer(callbacks=[AheadRollout(), Timeline()])
    """

    def __init__(self, pictures_every_n_rounds: int = 20, rounds_in_picture: int = 3) -> None:
        check_count("Timeline", "pictures_every_n_rounds", pictures_every_n_rounds, 1)
        check_count("Timeline", "rounds_in_picture", rounds_in_picture, 1)
        self.pictures_every_n_rounds = pictures_every_n_rounds
        self.rounds_in_picture = rounds_in_picture
        self._laps: list[Lap] = []
        self._last: Round | None = None
        self._file: TraceFile | None = None
        self._began = 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Note when the update or a part of it begins."""
        if (session := rollout_datamodule(trainer, self).session) is not None:
            self._began = session.timeline.now()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Record the update or a part of it."""
        if (session := rollout_datamodule(trainer, self).session) is not None:
            session.timeline.add(TRAINER, "update", self._began, session.timeline.now())

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log and write what happened since the rollout before this one."""
        self._last = round
        round.metrics |= self._take(trainer)
        if round.ordinal % self.pictures_every_n_rounds == 0:
            self._draw(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log and write what happened since the last rollout."""
        session = rollout_datamodule(trainer, self).session
        if session is not None and self._last is not None:
            session.timeline.mark()
            log_now(trainer, self._take(trainer))
            self._draw(trainer)
        self._laps, self._last, self._file = [], None, None

    def _take(self, trainer: Trainer) -> dict[str, float]:
        data = rollout_datamodule(trainer, self)
        assert data.session is not None and self._last is not None
        lap, clock = data.session.timeline.lap(), data.run.clock
        self._laps = [*self._laps, lap][-self.rounds_in_picture :]
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if self._file is None:
                self._file = TraceFile(folder_of(trainer) / "timeline.json")
                self._file.keep(clock.before)
            self._file.add(lap, clock.at, self._last.ordinal)
        return {f"timeline/{name}": value for name, value in lap.totals().items()}

    def _draw(self, trainer: Trainer) -> None:
        from lit_rlsched.callbacks import pictures  # imports matplotlib

        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            assert self._last is not None
            figure = pictures.waits(self._laps, self._last.metrics)
            pictures.publish({"waits": figure}, trainer)
