"""A progress bar that also moves while completions are drawn."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, find_run
from lit_rlsched.callbacks.time_left import TimeLeft
from lit_rlsched.run.trainer import is_partial_check
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.text import duration, percent
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group


class RoundLine:
    """Collects what happens in a round and says it in one line."""

    def __init__(self) -> None:
        self._rollout_ended = self._update_ended = 0.0
        self._round: Round | None = None
        self.accuracy: float | None = None
        """Held-out accuracy, if it was measured since the last line."""

    def rollout_ends(self, round: Round) -> None:
        """Remember the round and start the clock of its update."""
        self._round, self._rollout_ended = round, time.monotonic()

    def step_ends(self) -> None:
        """Stop the clock of the update, if this is its last step."""
        self._update_ended = time.monotonic()

    def text(self, head: str, left: float | None, others: Mapping[str, object]) -> str:
        """Return the line of the round that has ended, and forget the round."""
        parts = [] if self._round is None else self._results(self._round)
        if self.accuracy is not None:
            parts.insert(min(1, len(parts)), f"held-out accuracy {self.accuracy:.2f}")
        parts += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in others.items()]
        if left is not None:
            parts.append(f"{duration(left)} left")
        self._round = self.accuracy = None
        return f"{head}: {', '.join(parts)}"

    def _results(self, round: Round) -> list[str]:
        metrics = round.metrics
        return [
            f"reward {metrics['reward']:.3f}",
            f"{metrics['rollout/tokens_per_second']:,.0f} tokens/s",
            f"{metrics['completions/mean_length']:.0f} tokens on average",
            f"{percent(metrics['completions/clipped_ratio'])} cut",
            f"{percent(metrics['rollout/bubble_ratio'])} idle",
            f"rollout {duration(metrics['time/rollout'])}",
            f"update {duration(max(0.0, self._update_ended - self._rollout_ended))}",
        ]


SECONDS_PER_FRAME = 0.25
"""Shortest time between two updates of the rollout bar in a terminal."""
SECONDS_PER_LINE = 2.0
"""Shortest time between two lines about rounds in a log; the rounds between get no line unless
they were validated."""
SECONDS_PER_ROLLOUT_LINE = 30.0
"""Shortest time between two lines about one rollout in a log."""


class RunBar(Tqdm):
    """Bar of the run. It shows `left`, as tqdm knows nothing of validations that are still due."""

    left = "?"

    @property
    def format_dict(self) -> dict[str, Any]:
        """Add `left` to what the bar's format may name."""
        return super().format_dict | {"left": self.left}


class RolloutBar(Tqdm):
    """Bar of one round's completions."""

    def __init__(self, plan: Sequence[Group], **kwargs: Any) -> None:
        self.plan = plan
        self.scored = 0
        self.began = self._shown = time.monotonic()
        super().__init__(
            desc="  rollout",
            total=self._remaining(),
            unit="completion",
            leave=False,
            dynamic_ncols=True,
            file=sys.stdout,
            **kwargs,
        )

    def advance(self, trace: RolloutTrace) -> dict[str, float] | None:
        """Count a scored completion; return the round's speed if it is time to show it."""
        self.scored += 1
        now = time.monotonic()
        pause = SECONDS_PER_ROLLOUT_LINE if self.disable else SECONDS_PER_FRAME
        remaining = self._remaining()
        over = self.disable and not remaining  # as when the round was drawn ahead
        if now - self._shown < pause or over:
            return None
        self._shown = now
        self.n, self.total = self.scored, self.scored + remaining
        tokens = trace.busy_slot_steps  # includes those of unfinished completions
        rate = round(tokens / max(trace.seconds, 1e-9))
        return {"tok/s": rate, "bubble": trace.bubble_ratio}

    def _remaining(self) -> int:
        return sum(not c.scored for group in self.plan for c in group.completions)


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
        self._rollout_bar: RolloutBar | None = None
        self._figures: dict[str, float] = {}
        self._line = RoundLine()
        self._left = TimeLeft()
        self._printed = self._evaluated = -math.inf

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
        now = time.monotonic()
        if not done:
            self._evaluated = now
        begins = not done and trainer.state.fn != "fit"  # which has said more
        if begins or (now - self._evaluated >= SECONDS_PER_ROLLOUT_LINE and done < total):
            self._evaluated = now
            what = next((w for w in ("test", "predict") if trainer.state.fn == w), "validation")
            self._print(f"  {what}: {done:,} of {total:,} completions")

    def init_train_tqdm(self) -> Tqdm:
        """Make the bar of the run."""
        return RunBar(
            desc=self.train_description,
            position=2 * self.process_position,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            smoothing=0,
            bar_format=self.BAR_FORMAT.replace("remaining", "left"),
        )

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Draw one bar for the whole run."""
        super().on_train_start()
        bar, total = self.train_progress_bar, trainer.max_epochs
        bar.unit, done = "round", trainer.current_epoch
        if trainer.max_steps != -1:
            bar.unit, done, total = "step", trainer.global_step, trainer.max_steps
        bar.set_description(f"{bar.unit.capitalize()}s")
        bar.reset(None if total == -1 else total)
        bar.initial = bar.n = done
        self._left.training_starts(trainer)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Keep Lightning from resetting the bar for each epoch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Show the metrics of the step."""
        self._line.step_ends()
        self._advance(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the round."""
        rounds = trainer.current_epoch + 1
        self._left.round_ends()
        left = self._left.seconds(trainer, rounds)
        self.train_progress_bar.left = "?" if left is None else duration(left)
        self._advance(trainer, pl_module, rounds)
        last = rounds == trainer.max_epochs or trainer.global_step == trainer.max_steps
        validated = self._line.accuracy is not None
        now = time.monotonic()
        if last or validated or now - self._printed >= SECONDS_PER_LINE:
            of = "" if trainer.max_epochs == -1 else f"/{trainer.max_epochs}"
            others = self.get_metrics(trainer, pl_module)
            others = {k: v for k, v in others.items() if k not in self._figures}
            self._print(self._line.text(f"round {rounds}{of}", left, others))
            self._printed = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the validation."""
        self._left.validation_starts()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the held-out accuracy."""
        if not is_partial_check(trainer):
            self._left.validation_ends()
        accuracy = trainer.callback_metrics.get("val/accuracy")
        if trainer.state.fn == "fit" and accuracy is not None and not is_partial_check(trainer):
            self._figures["val/accuracy"] = float(accuracy)
            if trainer.sanity_checking:
                self._print(f"before training: held-out accuracy {float(accuracy):.2f}")
            else:
                self._line.accuracy = float(accuracy)
        super().on_validation_end(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return reward and accuracy, then what was logged with `prog_bar=True`."""
        ours: dict[str, Any] = dict(sorted(self._figures.items()))  # the reward first
        metrics = ours | super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _advance(self, trainer: Trainer, pl_module: LightningModule, rounds: int) -> None:
        bar = self.train_progress_bar
        done = rounds if bar.unit == "round" else trainer.global_step
        if not bar.disable and self._should_update(done, bar.total):
            bar.n = done
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_round_start(self, trainer: Trainer, pl_module: Any, plan: list[Group]) -> None:
        """Draw a bar for the completions of the round."""
        position = 2 * self.process_position + 1
        self._rollout_bar = RolloutBar(
            plan, position=position, disable=self.is_disabled, bar_format=self.BAR_FORMAT
        )

    def on_completion_end(self, trainer: Any, pl_module: Any, completion: Completion) -> None:
        """Show how far the rollout is."""
        bar = self._rollout_bar
        assert bar is not None, "a completion outside a round"
        if (speed := bar.advance(trainer.datamodule.run.session.trace)) is not None:
            if not bar.disable:
                bar.set_postfix(speed)
            idle = percent(speed["bubble"])
            of = f"{bar.n:,} of {bar.total:,} completions"
            self._print(f"  rollout: {of}, {speed['tok/s']:,} tokens/s, {idle} idle")

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Remove the rollout bar and remember the metrics of the round."""
        if self._rollout_bar is not None:
            self._rollout_bar.close()
        self._figures["reward"] = round.metrics["reward"]
        self._line.rollout_ends(round)

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


def _interactive() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return sys.stdout.isatty() or hasattr(shell, "kernel")  # the latter in a notebook
