"""A progress bar that also moves while completions are drawn."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.logs import is_partial_check
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group

SECONDS_PER_FRAME = 0.25
"""In a terminal."""
SECONDS_PER_LINE = 2.0
"""Between two rounds in a log, where nothing can be drawn over; rounds between are left out."""
SECONDS_PER_ROLLOUT_LINE = 30.0
"""Between two lines about one round."""


class RolloutProgressBar(TQDMProgressBar, RolloutCallback):
    """Shows the run, in rounds or, with `max_steps`, in optimizer steps, and below it the rollout.

    Where the output is not a terminal it prints a line for each round and validation instead.

    Args:
        refresh_rate: See `TQDMProgressBar`; 0 switches it off.
        process_position: See `TQDMProgressBar`.

    Example::

        Trainer(callbacks=[RolloutProgressBar()])
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0) -> None:
        super().__init__(refresh_rate, process_position)
        self._rollout_bar: Tqdm | None = None
        self._figures: dict[str, float] = {}
        self._speed: dict[str, float] = {}
        self._plan: Sequence[Group] = ()
        self._done = 0
        self._shown = 0.0
        self._printed = -math.inf
        self._round_began: float | None = None

    @property
    def is_disabled(self) -> bool:
        """Whether bars are not drawn; `is_enabled` says whether anything is shown at all."""
        return super().is_disabled or not _interactive()

    # The run.

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Draw one bar for the whole run."""
        super().on_train_start()
        bar, total = self.train_progress_bar, trainer.max_epochs
        if trainer.max_steps != -1:
            bar.unit, done, total = "step", trainer.global_step, trainer.max_steps
        else:
            bar.unit, done = "round", trainer.current_epoch
        bar.set_description(f"{bar.unit.capitalize()}s")
        bar.reset(None if total == -1 else total)
        bar.initial = bar.n = done

    def on_train_epoch_start(self, *_: Any) -> None:
        """Leave the bar as it is: it is not about one epoch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Show the step's figures."""
        self._advance(trainer, pl_module, rounds=trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the round."""
        rounds = trainer.current_epoch + 1
        self._advance(trainer, pl_module, rounds)
        of = "" if trainer.max_epochs == -1 else f"/{trainer.max_epochs}"
        figures = {**self.get_metrics(trainer, pl_module), **self._speed}
        if self._round_began is not None:
            figures["seconds"] = time.monotonic() - self._round_began
        last = rounds == trainer.max_epochs or trainer.global_step == trainer.max_steps
        if last or time.monotonic() - self._printed >= SECONDS_PER_LINE:
            self._print(f"{rounds}{of} rounds", figures)
            self._printed = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the headline figure in sight."""
        accuracy = trainer.callback_metrics.get("val/accuracy")
        if trainer.state.fn == "fit" and accuracy is not None and not is_partial_check(trainer):
            self._figures["val/accuracy"] = float(accuracy)
            step = trainer.global_step
            when = f"at step {step}" if step else "before training"
            self._print(f"validation {when}", {"val/accuracy": float(accuracy)})
        super().on_validation_end(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Reward, accuracy, and what was logged with `prog_bar=True`."""
        ours = sorted(self._figures.items())  # the reward first
        figures: dict[str, Any] = {**dict(ours), **super().get_metrics(trainer, pl_module)}
        figures.pop("v_num", None)
        return figures

    def _advance(self, trainer: Trainer, pl_module: LightningModule, rounds: int) -> None:
        bar, done = self.train_progress_bar, trainer.global_step
        if bar.unit == "round":
            done = rounds
        if not bar.disable and self._should_update(done, bar.total):
            bar.n = done
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    # The rollout of a round.

    def on_round_start(
        self, trainer: Trainer, pl_module: LightningModule, plan: list[Group]
    ) -> None:
        """Draw a bar for the round's completions."""
        self._plan, self._done = plan, 0
        self._round_began = self._shown = time.monotonic()
        self._rollout_bar = Tqdm(
            desc="  rollout",
            total=self._to_do(),
            unit="completion",
            position=2 * self.process_position + 1,
            disable=self.is_disabled,
            leave=False,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
        )

    def on_completion_end(
        self, trainer: Trainer, pl_module: LightningModule, completion: Completion
    ) -> None:
        """Show how far the round is, a few times a second at most."""
        self._done += 1
        now, bar = time.monotonic(), self._rollout_bar
        assert bar is not None, "a completion outside a round"
        if now - self._shown < (SECONDS_PER_ROLLOUT_LINE if bar.disable else SECONDS_PER_FRAME):
            return
        self._shown = now
        trace = trainer.datamodule.session.trace  # type: ignore[attr-defined]
        # Each place that is used in a step draws a token, of completions that still run too.
        rate = trace.busy_slot_steps / max(trace.seconds, 1e-9)
        figures = {"tok/s": round(rate), "bubble": trace.bubble_ratio}
        total = self._done + self._to_do()
        if bar.disable:
            self._print(f"  rollout {self._done}/{total}", figures)
        else:
            bar.n, bar.total = self._done, total
            bar.set_postfix(figures)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Clear the round's bar and take up its figures."""
        if self._rollout_bar is not None:
            self._rollout_bar.close()
            self._rollout_bar = None
        self._figures["reward"] = round.metrics["reward"]
        self._speed = {
            "tok/s": int(round.metrics["rollout/tokens_per_second"]),
            "bubble": round.metrics["rollout/bubble_ratio"],
        }

    def _to_do(self) -> int:
        # Looked up anew: groups stop early, and prompts are replaced by others.
        return sum(not c.scored for group in self._plan for c in group.completions)

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print beside the bars, or plainly where there are none."""
        if self.is_enabled and self.is_disabled:
            print(*args, sep=sep, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)

    def _print(self, head: str, figures: dict[str, Any]) -> None:
        if self.is_enabled and self.is_disabled:
            shown = (
                f"{k} {v}" if isinstance(v, int) else f"{k} {v:.4g}" for k, v in figures.items()
            )
            print(f"{head}: {', '.join(shown)}", flush=True)


def _interactive() -> bool:
    return sys.stdout.isatty() or "ipykernel" in sys.modules
