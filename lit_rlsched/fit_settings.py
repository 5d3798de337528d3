"""What a Trainer is set to while it fits, so that it counts optimizer steps and rounds."""

import math
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class FitSettings:
    """Settings of a Trainer that are about batches, made to be about optimizer steps.

    Every round has its figures in the loggers: `log_every_n_steps` is at most the steps of a round.

    With automatic optimization Lightning's batches are micro-batches, of which a round has any
    number, so that it can neither count steps ahead nor cut a round between two. For it,
    `MicroBatchAccumulation` is added; `estimated_stepping_batches` is right in
    `configure_optimizers`; and `limit_train_batches`, `overfit_batches` and `fast_dev_run` take
    the first optimizer steps of a round, as they do with manual optimization.

    Args:
        trainer: About to fit; its module and the data module are known.
        steps_per_round: Optimizer steps that a round is dealt out to, inner epochs included.

    Raises:
        MisconfigurationException: a limit leaves nothing, or gradients are to be accumulated over
            a fixed number of batches.
    """

    def __init__(self, trainer: Trainer, steps_per_round: int) -> None:
        self._trainer = trainer
        self._before: dict[str, Any] = {}
        self._added: Callback | None = None
        self._counting = False
        self.steps = _limited(trainer, steps_per_round)
        """Optimizer steps that are taken of a round."""
        if self.steps and trainer.log_every_n_steps > self.steps:  # type: ignore[attr-defined]
            self._set(log_every_n_steps=self.steps)
        if self.steps and trainer.lightning_module.automatic_optimization:
            self._lead_automatic_optimization(trainer)

    def _lead_automatic_optimization(self, trainer: Trainer) -> None:
        from lit_rlsched.callbacks import MicroBatchAccumulation

        if trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})`: an "
                "optimizer step has as many micro-batches as its completions need, and takes them "
                "all. Leave it out; `micro_batch_tokens` is the size of a micro-batch, "
                "`prompts_per_round` over `steps_per_round` that of a step."
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(c, MicroBatchAccumulation) for c in callbacks):
            self._added = MicroBatchAccumulation()
            callbacks.insert(0, self._added)
        self._set(limit_train_batches=1.0)  # the loader ends where the limit is
        # what `estimated_stepping_batches` looks at: a loader with a length, which nothing iterates
        trainer.fit_loop._combined_loader = CombinedLoader(range(self.steps))
        trainer.fit_loop.max_batches = self.steps
        self._counting = True

    def begin(self) -> None:
        """Optimizers are configured: from here on the Trainer must see the real loader."""
        if self._counting:
            self._counting = False
            self._trainer.fit_loop._combined_loader = None
            self._trainer.fit_loop.max_batches = math.inf

    def undo(self) -> None:
        """Leave the Trainer as it was; safe to call twice."""
        self.begin()
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
    """Optimizer steps of a round that the Trainer's limit leaves."""
    limit = trainer.limit_train_batches
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]
    left = min(steps, limit) if isinstance(limit, int) else int(steps * limit)
    if limit and not left:
        raise MisconfigurationException(
            f"`Trainer({name}={limit})` leaves nothing: a round has {steps} optimizer steps, which "
            f"are its batches. Use {1 / steps:g} or more, or 1 for one step."
        )
    if 0 < left < steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"`Trainer({name}={limit})` takes {left} of the {steps} optimizer steps of each round; "
            "the completions of the others are drawn for nothing and counted in "
            "`dropped/limit_train_batches`."
        )
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"`Trainer(overfit_batches={limit})` limits the steps of a round, but each round draws "
            "other prompts. To overfit, give `train_data` no more than `prompts_per_round` rows."
        )
    return left
