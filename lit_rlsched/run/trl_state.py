"""What a script reads of TRL's trainers once they have trained: state, result, accelerator."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput, speed_metrics


def with_their_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics, those of validations by TRL's name too: `eval_reward` for `val/reward`."""
    theirs = {n.replace("val/", "eval_", 1): v for n, v in metrics.items() if n.startswith("val/")}
    return {**metrics, **theirs}


_ITS_NAME = {"eval_reward", "train_runtime"}
"""Is in the entry of a validation and of the whole training, which have nothing else."""


class History(Callback, Logger):
    """Collects what is logged as `TrainerState.log_history`; a checkpoint holds it."""

    name, version = "history", ""

    def __init__(self) -> None:
        self.trainer: Any = None
        """The Trainer, once it is made."""
        self.entries: list[dict[str, float]] = []
        self.steps_per_pass: float = 0
        """Optimizer steps of a pass over the prompts, once it is known."""
        self._losses = 0.0
        self._steps = 0
        self._began = 0.0, 0

    @property
    def save_dir(self) -> str | None:
        """Folder of the run."""
        return self.trainer and self.trainer.default_root_dir

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing: the settings are the script's."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the entry of an optimizer step, from 1; a validation has its own."""
        figures = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if any(name.startswith("val/") for name in figures):
            self._add(with_their_names(figures), self.trainer.global_step)
        elif figures:
            self._add(figures, (step or 0) + 1)

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        kind = _ITS_NAME.intersection(figures)
        last = self.entries[-1] if self.entries else {}
        if last.get("step") != step or _ITS_NAME.intersection(last) != kind:
            self.entries.append({})
        self.entries[-1] |= {**figures, "epoch": self._epoch(step), "step": step}

    def _epoch(self, step: int) -> float:
        return step / self.steps_per_pass if self.steps_per_pass else 0.0

    def on_fit_start(self, trainer: Trainer, *args: Any) -> None:
        """Start the clock."""
        self._began = time.time(), self._steps
        run = trainer.datamodule.run  # type: ignore[attr-defined]
        rounds = len(run.rows["train"]) / run.settings.prompts_per_round
        rounds = int(rounds) if run.settings.whole_rounds else rounds
        self.steps_per_pass = rounds * run.settings.steps_per_epoch

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Add the loss of this optimizer step to their mean."""
        self._losses += float(trainer.callback_metrics.get("loss", 0.0))
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with."""
        entries = [dict(entry) for entry in self.entries]
        return {"entries": entries, "losses": self._losses, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.entries[:] = [dict(entry) for entry in state_dict["entries"]]
        self._losses, self._steps = state_dict["losses"], state_dict["steps"]

    def output(self, completions: int) -> TrainOutput:
        """Return the result of a training with this number of completions per optimizer step."""
        began, before = self._began
        steps = self._steps - before
        loss = self._losses / max(1, self._steps)
        speed = speed_metrics("train", began, steps * completions, steps)
        step = self.trainer.global_step
        metrics = {**speed, "train_loss": loss, "epoch": self._epoch(step)}
        self._add(metrics, step)
        return TrainOutput(step, loss, metrics)

    def state(self, **settings: Any) -> TrainerState:
        """Return transformers' state of a trainer."""
        trainer = self.trainer
        saving = (one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint))
        best = next((one for one in saving if one.best_model_score is not None), None)
        return TrainerState(
            epoch=self._epoch(trainer.global_step),
            global_step=trainer.global_step,
            max_steps=trainer.max_steps,
            log_history=self.entries,
            best_metric=best and float(torch.as_tensor(best.best_model_score)),
            best_model_checkpoint=best and best.best_model_path,
            is_local_process_zero=trainer.local_rank == 0,
            is_world_process_zero=trainer.is_global_zero,
            **settings,
        )


def accelerator_of(trainer: Trainer) -> SimpleNamespace:
    """Return what scripts use of `trainer.accelerator`; the Trainer is Lightning's."""
    return SimpleNamespace(
        is_main_process=trainer.is_global_zero,
        is_local_main_process=trainer.local_rank == 0,
        num_processes=trainer.world_size,
        process_index=trainer.global_rank,
        local_process_index=trainer.local_rank,
        device=trainer.strategy.root_device,
        print=trainer.print,
        wait_for_everyone=trainer.strategy.barrier,
        unwrap_model=lambda model, *args, **kwargs: model,
    )
