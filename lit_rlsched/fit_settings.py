"""Adapts a Trainer, while it fits, to count optimizer steps and rounds instead of batches."""

import math
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.checks import check_accumulation


class FitSettings:
    """Changes the Trainer's settings about batches to be about optimizer steps.

    `log_every_n_steps` is at most the number of steps in a round, so every round is logged.

    With automatic optimization Lightning's batches are micro-batches. A round has any number of
    them, so Lightning can neither count steps ahead nor cut a round between two steps. In this case
    `MicroBatchAccumulation` is added, `estimated_stepping_batches` is right in
    `configure_optimizers`, and `limit_train_batches`, `overfit_batches` and `fast_dev_run` take the
    first optimizer steps of a round, as they do with manual optimization.

    Args:
        trainer: A Trainer about to fit, with its module and data module.
        steps_per_round: Number of optimizer steps per round, iterations included.

    Raises:
        MisconfigurationException: a limit leaves no step, or `accumulate_grad_batches` is set.
    """

    def __init__(self, trainer: Trainer, steps_per_round: int) -> None:
        self._trainer = trainer
        self._before: dict[str, Any] = {}
        self._added: Callback | None = None
        self._counting = False
        self.steps = _limited(trainer, steps_per_round)
        """Number of optimizer steps taken per round."""
        if self.steps and trainer.log_every_n_steps > self.steps:  # type: ignore[attr-defined]
            self._set(log_every_n_steps=self.steps)
        bar = trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and trainer.max_epochs == -1:
            # Lightning writes `Epoch 1/-2`
            bar._get_train_description = "Epoch {}".format  # type: ignore[method-assign]
        if self.steps and trainer.lightning_module.automatic_optimization:
            self._adapt_automatic_optimization(trainer)

    @property
    def is_last_round(self) -> bool:
        """Whether training ends with the round that begins now."""
        trainer = self._trainer
        epochs = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        return epochs or 0 <= trainer.max_steps <= trainer.global_step + self.steps

    def _adapt_automatic_optimization(self, trainer: Trainer) -> None:
        from lit_rlsched.callbacks import MicroBatchAccumulation

        check_accumulation(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(c, MicroBatchAccumulation) for c in callbacks):
            self._added = MicroBatchAccumulation()
            callbacks.insert(0, self._added)
        self._set(limit_train_batches=1.0)  # the loader itself ends at the limit
        # `estimated_stepping_batches` takes the length of this loader, which nothing iterates over
        trainer.fit_loop._combined_loader = CombinedLoader(range(self.steps))
        trainer.fit_loop.max_batches = self.steps
        self._counting = True

    def begin(self) -> None:
        """Let the Trainer use the real loader; called once optimizers are configured."""
        if self._counting:
            self._counting = False
            self._trainer.fit_loop._combined_loader = None
            self._trainer.fit_loop.max_batches = math.inf

    def undo(self) -> None:
        """Restore the Trainer's own settings; safe to call twice."""
        self.begin()
        vars(self._trainer.progress_bar_callback or self).pop("_get_train_description", None)
        for name, value in self._before.items():
            setattr(self._trainer, name, value)
        self._before = {}
        if self._added is not None:
            self._trainer.callbacks.remove(self._added)  # type: ignore[attr-defined]
            self._trainer.accumulate_grad_batches = 1
            self._added = None

    def _set(self, **settings: Any) -> None:
        for name, value in settings.items():
            self._before[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, value)


def _limited(trainer: Trainer, steps: int) -> int:
    """Number of optimizer steps per round within the Trainer's limits."""
    limit = trainer.limit_train_batches
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]
    left = min(steps, limit) if isinstance(limit, int) else int(steps * limit)
    if limit and not left:
        raise MisconfigurationException(
            f"`Trainer({name}={limit})` leaves nothing: a round has {steps} optimizer steps, which "
            f"count as its batches. Use {1 / steps:g} or more, or 1 for one step."
        )
    if 0 < left < steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"`Trainer({name}={limit})` takes {left} of the {steps} optimizer steps of each round; "
            "the completions of the other steps are drawn but not trained on, and counted in "
            "`dropped/limit_train_batches`."
        )
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"`Trainer(overfit_batches={limit})` limits the steps of a round, but each round draws "
            "new prompts. To overfit, give `train_data` at most `prompts_per_round` rows."
        )
    return left
