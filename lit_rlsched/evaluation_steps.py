"""Validation, test and predict steps on held-out prompts."""

from typing import Any

from lightning import LightningModule
from torchmetrics import MeanMetric

from lit_rlsched.evaluation import Evaluated
from lit_rlsched.logs import is_partial_check, log_now
from lit_rlsched.predictions import prediction_rows


class EvaluationSteps(LightningModule):
    """Logs the average metrics of held-out prompts, under `val/` or `test/`.

    In your own LightningModule, put it before `LightningModule` among the base classes.
    """

    _evaluation: dict[str, MeanMetric]

    def on_validation_epoch_start(self) -> None:
        self._evaluation = {}

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, item: Evaluated, batch_idx: int) -> None:
        for name, value in item.metrics().items():
            metric = self._evaluation.setdefault(name, MeanMetric().to(self.device))
            metric.update(value)

    test_step = validation_step

    def predict_step(self, item: Evaluated, batch_idx: int) -> list[dict[str, Any]]:
        """Return a row for each completion of a prompt; see `predictions.prediction_rows`."""
        names = self.trainer.datamodule.rewards.names  # type: ignore[attr-defined]
        return prediction_rows(item, names)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        figures = {f"{stage}/{name}": m.compute() for name, m in self._evaluation.items()}
        trainer = self.trainer
        training = trainer.state.fn == "fit"
        if training and not is_partial_check(trainer):
            # Lightning would drop the baseline, and log later values at other steps.
            position = trainer.datamodule.run.position  # type: ignore[attr-defined]
            log_now(trainer, position | figures, step=trainer.global_step)
        if not trainer.sanity_checking:
            headline = f"{stage}/accuracy"
            rest = {k: v for k, v in figures.items() if k != headline}
            also: Any = {"batch_size": 1, "sync_dist": True, "logger": not training}
            self.log_dict(rest, **also)
            self.log(headline, figures[headline], prog_bar=True, **also)
