"""Every callback of Lightning does what it says, or is refused with the reason."""

import csv
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from plain_module import Plain
from seen_rounds import At, vector

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.run.checks import REFUSED_CALLBACKS, check_trainer
from lit_rlsched.settings import UsageError

MADE: dict[str, Any] = {
    "BatchSizeFinder": {},
    "GradientAccumulationScheduler": {"scheduling": {1: 2}},
    "LearningRateFinder": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "SpikeDetection": {},
}
"""Arguments of those that are refused."""
TRIED = {
    *("BackboneFinetuning", "BaseFinetuning", "BasePredictionWriter", "DeviceStatsMonitor"),
    *("EarlyStopping", "EMAWeightAveraging", "LambdaCallback", "LearningRateMonitor"),
    *("ModelCheckpoint", "ModelSummary", "OnExceptionCheckpoint", "RichModelSummary"),
    *("RichProgressBar", "StochasticWeightAveraging", "ThroughputMonitor", "Timer"),
    *("TQDMProgressBar", "WeightAveraging"),
}
"""Those of which a test below, or of `test_module.py`, sees the effect."""
BASES = {"Callback", "Checkpoint", "ProgressBar"}


def test_every_callback_is_tried_or_refused():
    assert {*callbacks.__all__} == TRIED | REFUSED_CALLBACKS.keys() | BASES
    assert MADE.keys() == REFUSED_CALLBACKS.keys()


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_what_is_refused_has_its_reason(fit, tiny_model, name, automatic):
    given = getattr(callbacks, name)(**MADE[name])
    module = Plain(tiny_model) if automatic else GRPOModule(tiny_model)
    with pytest.raises(UsageError, match=f"^`{name}`: "):
        fit(module, [given])
    assert automatic or module.model is None, "before anything was loaded"

    class Own(type(given)):
        pass

    with pytest.raises(UsageError, match=r"^`Own`: "):
        fit(Plain(tiny_model) if automatic else None, [Own(**MADE[name])])


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_the_tuner_is_refused(tiny_model, digits, sums, method):
    data = RolloutDataModule(sums, [digits], engine=TransformersEngine())
    tuner = Tuner(Trainer(accelerator="cpu", logger=False, enable_progress_bar=False))
    with pytest.raises(UsageError, match=rf"`Tuner.{method}`"):
        getattr(tuner, method)(GRPOModule(tiny_model), datamodule=data)


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_sharded_weights_are_not_averaged(name):
    made = callbacks.EMAWeightAveraging() if name[0] == "E" else getattr(callbacks, name)(1e-3)
    trainer = Trainer(
        accelerator="cpu", strategy="fsdp2", devices=2, logger=False, callbacks=[made]
    )
    with pytest.raises(UsageError, match=f"`{name}`: it averages whole weights"):
        check_trainer(trainer)


def test_ddp_refuses_layers_that_are_thawed_later():
    made = callbacks.BackboneFinetuning()
    trainer = Trainer(accelerator="cpu", strategy="ddp", devices=2, logger=False, callbacks=[made])
    with pytest.raises(UsageError, match="`BackboneFinetuning` with 2 processes"):
        check_trainer(trainer)


def weights(trainer, pl_module, *_):
    return vector(pl_module)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_average_is_that_of_the_rounds(fit, tiny_model, lora_rank):
    starts, steps = At(weights, "on_train_epoch_start"), At(weights, "on_train_batch_end")
    swa = callbacks.StochasticWeightAveraging(swa_lrs=2e-3, swa_epoch_start=2, annealing_epochs=1)
    module = GRPOModule(tiny_model, learning_rate=1e-3, lora_rank=lora_rank)
    _, module, _ = fit(module, [starts, steps, swa], trainer={"max_epochs": 4})
    assert swa.n_averaged == 3, "from the second round on"
    expected = torch.stack(starts.seen[1:]).mean(0)
    torch.testing.assert_close(vector(module), expected, rtol=1e-6, atol=1e-8)
    assert not torch.equal(vector(module), steps.seen[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_moving_average_is_validated_and_the_policy_goes_on(fit, tiny_model, sums):
    """With an engine that has a copy of the weights: it decodes with either when it has to."""
    runs = {}
    for name in ("with", "without"):
        steps = At(weights, "on_train_batch_end")
        ema = [callbacks.EMAWeightAveraging(decay=0.5)] if name == "with" else []
        trainer, module, _ = fit(
            GRPOModule(tiny_model, learning_rate=1e-3),
            [steps, *ema],
            engine=ProcessEngine(TransformersEngine()),
            val_data=sums[90:94],
            trainer={"max_epochs": 3},
        )
        runs[name] = steps.seen, vector(module), trainer
        assert trainer.callback_metrics["sync/max_logp_diff"] < 1e-4
    steps, last, _ = runs["with"]
    assert all(torch.equal(a, b) for a, b in zip(steps, runs["without"][0], strict=True))
    average = steps[0]
    for trained in steps[1:]:
        average = (average + trained) / 2
    torch.testing.assert_close(last, average, rtol=1e-6, atol=1e-8)


def layers(module: Any) -> Any:
    return module.model.model.layers


class Finetuning(callbacks.BaseFinetuning):
    """Trains the first layer from the second round on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(layers(pl_module)[0])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(layers(pl_module)[0], optimizer, lr=1e-3)


class WithBackbone(GRPOModule):
    @property
    def backbone(self) -> Any:
        return layers(self)[0]


@pytest.mark.parametrize("whose", ["own", "backbone"])
def test_frozen_layers_stay_as_they_are(fit, tiny_model, whose):
    def first_and_all(trainer, pl_module):
        return vector(layers(pl_module)[0]), vector(pl_module)

    seen = At(first_and_all, "on_train_epoch_start", "on_train_end")
    if whose == "own":
        module, freezes = GRPOModule(tiny_model, learning_rate=1e-3), Finetuning()
    else:
        module = WithBackbone(tiny_model, learning_rate=1e-3)
        freezes = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    fit(module, [seen, freezes], trainer={"max_epochs": 3})
    frozen, whole = zip(*seen.seen, strict=True)
    assert torch.equal(frozen[0], frozen[1]) and not torch.equal(frozen[1], frozen[-1])
    assert not torch.equal(whole[0], whole[1])


class Written(callbacks.BasePredictionWriter):
    rows: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, *args):
        self.rows += prediction


@pytest.mark.logs("lr-AdamW")
@pytest.mark.filterwarnings("ignore")
def test_those_that_only_look_on(fit, tiny_model, sums, tmp_path, capsys):
    """All in one run."""
    begun = []
    timer = callbacks.Timer(timedelta(hours=1), interval="step")
    speed = callbacks.ThroughputMonitor(
        batch_size_fn=lambda batch: len(getattr(batch, "samples", "1")),
        window_size=2,
        length_fn=lambda batch: 99,
    )
    written = Written("batch")
    trainer, module, data = fit(
        callbacks=[
            timer,
            speed,
            written,
            callbacks.DeviceStatsMonitor(cpu_stats=True),
            callbacks.LambdaCallback(on_train_start=lambda *_: begun.append(1)),
            callbacks.LearningRateMonitor(logging_interval="step"),
            callbacks.RichModelSummary(),
            callbacks.RichProgressBar(),
        ],
        predict_data=sums[90:92],
        trainer={
            "max_epochs": 3,
            "logger": CSVLogger(tmp_path, name="", version=""),
            "enable_progress_bar": True,
            "enable_model_summary": True,
        },
    )
    assert begun and 0 < timer.time_elapsed("train") < 3600
    with (tmp_path / "metrics.csv").open() as file:
        logged = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    assert {"lr-AdamW", "train/samples"} <= logged
    assert any(name.startswith("DeviceStatsMonitor") for name in logged)
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    trainer.predict(module, datamodule=data)
    assert {row["uid"] for row in written.rows} and len(written.rows) == 2

    class Fails(Callback):
        def on_train_batch_end(self, *args):
            raise KeyError("a bug")

    saves = callbacks.OnExceptionCheckpoint(tmp_path, filename="failed")
    with pytest.raises(KeyError):
        fit(callbacks=[saves, Fails()], trainer={"enable_checkpointing": True})
    assert torch.load(tmp_path / "failed.ckpt", weights_only=True)["state_dict"]


def test_a_time_is_a_limit(fit):
    trainer, _, _ = fit(callbacks=[callbacks.Timer(timedelta(seconds=0), interval="step")])
    assert trainer.global_step == 0


@pytest.mark.parametrize("automatic", [True, False])
def test_a_run_without_a_number_of_rounds_shows_none(fit, tiny_model, capsys, automatic):
    bar = callbacks.RichProgressBar(refresh_rate=2)  # with 1 ours takes its place
    given = {"max_epochs": None, "max_steps": 2, "enable_progress_bar": True}
    fit(Plain(tiny_model) if automatic else None, [bar], trainer=given)
    shown = capsys.readouterr().out
    assert re.search(r"Epoch 1\b", shown) and "/-2" not in shown
    assert "_get_train_description" not in vars(bar)
