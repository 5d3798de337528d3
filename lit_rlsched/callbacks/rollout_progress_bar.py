"""A progress bar that also moves while completions are drawn."""

import math
import sys
import time
from collections import deque
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, find_run
from lit_rlsched.run.trainer import is_partial_check
from lit_rlsched.text import duration, percent
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group

RECENT = 20
"""Rounds whose mean time, validations included, is taken for that of a round to come."""
SECONDS_PER_FRAME = 0.25
"""Shortest time between two updates of the rollout bar in a terminal."""
SECONDS_PER_LINE = 2.0
"""Shortest time between two lines about rounds in a log, unless they were validated."""
SECONDS_PER_ROLLOUT_LINE = 30.0
"""Shortest time between two lines about one rollout in a log."""


class RolloutProgressBar(TQDMProgressBar, RolloutCallback):
    """Shows how far the run is, also inside a rollout.

    The upper bar counts rounds or, with `max_steps`, optimizer steps. If the output is not a
    terminal, a line is printed for each round instead, such as ::

        round 4/60: reward 0.305, 1,978 tokens/s, 40 tokens on average, 0 % cut, 54 % idle,
        rollout 5.8 s, update 3.4 s, loss -0.04183, 10 min left

    `cut` is the share of completions that reached `max_completion_length`, `idle` the share of
    slot-time without a completion. A round that was validated has the held-out accuracy too; rounds
    that take less than two seconds share a line.

    Args:
        refresh_rate: See `TQDMProgressBar`; 0 switches the callback off.
        process_position: See `TQDMProgressBar`.

    Example::

        Trainer(callbacks=[RolloutProgressBar()])
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0) -> None:
        super().__init__(refresh_rate, process_position)
        self._rollout_bar: Tqdm | None = None
        self._plan: list[Group] = []
        self._scored = 0
        self._figures: dict[str, float] = {}
        self._round: Round | None = None
        self._accuracy: float | None = None  # held out, if it was measured since the last line
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)  # rounds or steps, moment
        self._rollout_ended = self._update_ended = self._shown = 0.0
        self._printed = -math.inf

    @property
    def is_disabled(self) -> bool:
        """Whether no bars are drawn; `is_enabled` says whether anything is shown at all."""
        return super().is_disabled or not _interactive()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say what is started before anything else is shown; it may take minutes."""
        super().setup(trainer, pl_module, stage)
        run = find_run(trainer)
        if run is not None and self.is_enabled and trainer.is_global_zero:
            print(f"Loading the model and starting {run.settings.engine.name} ...", flush=True)

    def on_evaluation_progress(
        self, trainer: Trainer, pl_module: LightningModule, done: int, total: int
    ) -> None:
        """Print a line now and then, if no bars are drawn."""
        now, fn = time.monotonic(), trainer.state.fn
        if not done:
            self._shown = now
        begins = not done and fn != "fit"  # which has said more
        if begins or (now - self._shown >= SECONDS_PER_ROLLOUT_LINE and done < total):
            self._shown = now
            what = fn.value if fn in ("test", "predict") else "validation"
            self._print(f"  {what}: {done:,} of {total:,} completions")

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Draw one bar for the whole run."""
        super().on_train_start()
        bar, (done, total) = self.train_progress_bar, _reached(trainer, trainer.current_epoch)
        bar.unit = "round" if trainer.max_steps == -1 else "step"
        bar.set_description(f"{bar.unit.capitalize()}s")
        bar.reset(None if total == -1 else total)
        bar.initial = bar.n = done
        self._ends.clear()
        self._ends.append((done, time.monotonic()))

    def on_train_epoch_start(self, *_: Any) -> None:
        """Keep Lightning from resetting the bar for each epoch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Show the metrics of the step."""
        self._update_ended = time.monotonic()
        self._advance(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the round, and say how it went."""
        rounds, now = trainer.current_epoch + 1, time.monotonic()
        self._advance(trainer, pl_module, rounds)
        done, total = _reached(trainer, rounds)
        self._ends.append((done, now))
        last = rounds == trainer.max_epochs or done == total
        validated = self._accuracy is not None
        if not (last or validated or now - self._printed >= SECONDS_PER_LINE):
            return
        parts = [f"held-out accuracy {self._accuracy:.2f}"] if validated else []
        if self._round is not None:
            metrics = self._round.metrics
            parts = [
                f"reward {metrics['reward']:.3f}",
                *parts,
                f"{metrics['rollout/tokens_per_second']:,.0f} tokens/s",
                f"{metrics['completions/mean_length']:.0f} tokens on average",
                f"{percent(metrics['completions/clipped_ratio'])} cut",
                f"{percent(metrics['rollout/bubble_ratio'])} idle",
                f"rollout {duration(metrics['time/rollout'])}",
                f"update {duration(max(0.0, self._update_ended - self._rollout_ended))}",
            ]
        parts += [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.get_metrics(trainer, pl_module).items()
            if name not in self._figures
        ]
        before, began = self._ends[0]
        if before < done < total:
            rounds_left = (total - done) / (done - before) * (len(self._ends) - 1)
            if trainer.max_epochs not in (None, -1):  # whichever comes first
                rounds_left = min(rounds_left, trainer.max_epochs - rounds)
            parts.append(f"{duration((now - began) / (len(self._ends) - 1) * rounds_left)} left")
        of = "" if trainer.max_epochs == -1 else f"/{trainer.max_epochs}"
        self._print(f"round {rounds}{of}: {', '.join(parts)}")
        self._printed, self._round, self._accuracy = now, None, None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the held-out accuracy."""
        accuracy = trainer.callback_metrics.get("val/accuracy")
        if trainer.state.fn == "fit" and accuracy is not None and not is_partial_check(trainer):
            self._figures["val/accuracy"] = value = float(accuracy)
            if trainer.sanity_checking:
                self._print(f"before training: held-out accuracy {value:.2f}")
            else:
                self._accuracy = value
        super().on_validation_end(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return reward and accuracy, then what was logged with `prog_bar=True`."""
        ours: dict[str, Any] = dict(sorted(self._figures.items()))  # the reward first
        metrics = ours | super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if name != "v_num"}

    def _advance(self, trainer: Trainer, pl_module: LightningModule, rounds: int) -> None:
        bar, (done, _) = self.train_progress_bar, _reached(trainer, rounds)
        if not bar.disable and self._should_update(done, bar.total):
            bar.n = done
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_round_start(self, trainer: Trainer, pl_module: Any, plan: list[Group]) -> None:
        """Draw a bar for the completions of the round."""
        self._plan, self._scored, self._shown = plan, 0, time.monotonic()
        self._rollout_bar = Tqdm(
            total=_unscored(plan),
            desc="  rollout",
            unit="completion",
            leave=False,
            position=2 * self.process_position + 1,
            disable=self.is_disabled,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
        )

    def on_completion_end(self, trainer: Any, pl_module: Any, completion: Completion) -> None:
        """Show how far the rollout is, if it was not shown just now."""
        bar, now, remaining = self._rollout_bar, time.monotonic(), _unscored(self._plan)
        assert bar is not None, "a completion outside a round"
        self._scored += 1
        pause = SECONDS_PER_ROLLOUT_LINE if bar.disable else SECONDS_PER_FRAME
        if now - self._shown < pause or (bar.disable and not remaining):  # as if drawn ahead
            return
        self._shown = now
        bar.n, bar.total = self._scored, self._scored + remaining
        trace = trainer.datamodule.run.session.trace
        # the steps' tokens include those of unfinished completions
        rate = round(trace.busy_slot_steps / max(trace.seconds, 1e-9))
        if not bar.disable:
            bar.set_postfix({"tok/s": rate, "bubble": trace.bubble_ratio})
        of = f"{bar.n:,} of {bar.total:,} completions"
        self._print(f"  rollout: {of}, {rate:,} tokens/s, {percent(trace.bubble_ratio)} idle")

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Remove the rollout bar and remember the round."""
        if self._rollout_bar is not None:
            self._rollout_bar.close()
        self._figures["reward"] = round.metrics["reward"]
        self._round, self._rollout_ended = round, time.monotonic()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print without disturbing the bars."""
        if self.is_enabled and self.is_disabled:  # Lightning prints only beside bars
            print(*args, sep=sep, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)

    def _print(self, text: str) -> None:
        """Print a line, if no bars are drawn."""
        if self.is_disabled:
            self.print(text, flush=True)


def replace_default_bar(trainer: Trainer) -> None:
    """Put ours in the place of the bar that Lightning adds, which counts `0.00it/s` of a round."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for index, callback in enumerate(callbacks):
        kind = type(callback)
        lightnings = kind in (TQDMProgressBar, RichProgressBar)
        if lightnings and callback.refresh_rate == kind().refresh_rate:  # nobody has chosen it
            callbacks[index] = RolloutProgressBar()


def _reached(trainer: Trainer, rounds: int) -> tuple[int, int]:
    """Return rounds, or steps where they end the run, and how many there are; -1: no end."""
    if trainer.max_steps != -1:
        return trainer.global_step, trainer.max_steps
    return rounds, trainer.max_epochs or -1


def _unscored(plan: list[Group]) -> int:
    return sum(not c.scored for group in plan for c in group.completions)


def _interactive() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return sys.stdout.isatty() or hasattr(shell, "kernel")  # the latter in a notebook
