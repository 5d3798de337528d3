"""A Trainer counts optimizer steps and rounds, with manual and with automatic optimization."""

import csv
from collections import Counter

import pytest
import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from plain_module import Plain
from seen_rounds import At, Rounds, vector
from torch.utils.data import DataLoader

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import RNGState
from lit_rlsched.run.trainer import Clock, MicroBatchAccumulation
from lit_rlsched.settings import UsageError

TWO_STEPS = {"micro_batch_tokens": 64, "steps_per_round": 2}


class Scheduled(Plain):
    """A learning rate that falls linearly over the whole run, to zero behind its last step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
        self.steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, int(self.steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ScheduledOurs(GRPOModule):
    configure_optimizers = Scheduled.configure_optimizers

    def training_step(self, step, batch_idx):
        super().training_step(step, batch_idx)


class Rates(Rounds):
    def __init__(self):
        super().__init__()
        self.rates, self.micro_batches = [], Counter()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(round(1e3 * optimizer.param_groups[0]["lr"], 6))
        self.estimate = trainer.estimated_stepping_batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.micro_batches[trainer.global_step] += 1


@pytest.mark.mostly_slow("trainer1-5-Scheduled")
@pytest.mark.parametrize("make", [Scheduled, ScheduledOurs])
@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ({"max_epochs": 3}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": -1, "max_steps": 4}, 4),
        ({"max_epochs": 3, "limit_train_batches": 1}, 3),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_over_the_whole_run(fit, tiny_model, make, trainer, steps):
    rates, module = Rates(), make(tiny_model)
    trainer, _, _ = fit(module, [rates], trainer=trainer, **TWO_STEPS)
    assert module.steps == trainer.global_step == steps
    assert rates.rates == [round(1 - i / steps, 6) for i in range(steps)]
    if make is ScheduledOurs:
        assert rates.estimate == steps
    assert len(rates.rounds) == trainer.current_epoch


@pytest.mark.slow
def test_a_schedule_of_a_run_that_is_resumed(fit, tiny_model, tmp_path):
    def run(folder, *callbacks, ckpt_path=None):
        checkpoint = ModelCheckpoint(tmp_path / folder, every_n_train_steps=1, save_last=True)
        module, rates = Scheduled(tiny_model), Rates()
        trainer = {"max_epochs": 3, "enable_checkpointing": True}
        made = [RNGState(), checkpoint, rates, *callbacks]
        fit(module, made, trainer=trainer, ckpt_path=ckpt_path, **TWO_STEPS)
        return module, rates.rates

    def stop(trainer, *_):
        trainer.should_stop = trainer.global_step == 3

    whole, rates = run("whole")
    _, first = run("part", At(stop, "on_train_batch_end"))
    resumed, rest = run("part", ckpt_path=tmp_path / "part" / "last.ckpt")
    assert first + rest == rates and len(rest) == 3
    assert torch.equal(vector(resumed), vector(whole))


@pytest.mark.slow
def test_the_accumulation_is_added_and_taken_away(fit, tiny_model):
    settings = {"trainer": {"max_epochs": 2, "log_every_n_steps": 7}, **TWO_STEPS}
    named, rates = Plain(tiny_model), Rates()
    fit(named, [MicroBatchAccumulation(), rates], **settings)
    plain, own = Plain(tiny_model), Rates()
    trainer, _, data = fit(plain, [own], **settings)
    assert trainer.global_step == 4 and sum(own.micro_batches.values()) > 4
    assert torch.equal(vector(plain), vector(named)) and own.micro_batches == rates.micro_batches
    assert not any(isinstance(c, MicroBatchAccumulation) for c in trainer.callbacks)
    assert trainer.accumulate_grad_batches == 1 and trainer.log_every_n_steps == 7
    assert trainer.limit_train_batches == 1.0
    trainer.fit_loop.max_epochs = 3
    trainer.fit(plain, datamodule=data)  # and once more
    assert trainer.global_step == 6
    trainer.fit_loop.max_epochs = 4
    trainer.fit(GRPOModule(tiny_model), datamodule=data)
    assert trainer.current_epoch == 4 and data.run.num_rounds == 4


def test_nothing_is_left_behind_by_a_run_that_fails(fit, tiny_model, sums, digits, tmp_path):
    class Fails(Plain):
        def configure_optimizers(self):
            raise KeyError("no optimizer")

    started = At(lambda trainer, *_, **__: trainer, "setup")
    with pytest.raises(KeyError):
        fit(Fails(tiny_model), [started], trainer={"limit_train_batches": 1})
    (trainer,) = started.seen
    assert trainer.limit_train_batches == 1 and isinstance(trainer.limit_train_batches, int)
    assert trainer.fit_loop._combined_loader is None
    assert not any(isinstance(c, MicroBatchAccumulation) for c in trainer.callbacks)


@pytest.mark.mostly_slow("limit1-1-True", "limit3-1-False", "limit4-2-False")
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        ({"limit_train_batches": 1}, 1),
        ({"limit_train_batches": 0.5}, 1),
        ({"overfit_batches": 1}, 1),
        ({"fast_dev_run": True}, 1),
        ({"limit_train_batches": 5}, 2),
    ],
)
def test_a_limit_is_in_optimizer_steps_and_what_it_cuts_is_counted(
    fit, tiny_model, tmp_path, automatic, limit, steps
):
    module, rates = Plain(tiny_model) if automatic else None, Rates()
    _, _, data = fit(module, [rates], trainer=limit, **TWO_STEPS)
    rounds = 1 if "fast_dev_run" in limit else 2
    assert len(rates.rounds) == rounds
    assert len(rates.rates) == rounds * steps  # each a whole one:
    parts = [
        [len(data.run.update.step(r, i)) for i in range(steps)] if automatic else [1] * steps
        for r in rates.rounds
    ]
    assert sum(rates.micro_batches.values()) == sum(map(sum, parts))
    drawn = data.run.counters["num_completions"]
    assert drawn == 16 * rounds
    assert data.run.counters["dropped/limit_train_batches"] == drawn * (2 - steps) / 2


@pytest.mark.parametrize("automatic", [True, False])
def test_a_limit_that_leaves_nothing_or_a_fixed_accumulation_is_refused(fit, tiny_model, automatic):
    module = Plain(tiny_model) if automatic else None
    message = r"`Trainer\(limit_train_batches=0.4\)` leaves nothing: a round has 2 .* Use 0.5 or"
    with pytest.raises(UsageError, match=message):
        fit(module, trainer={"limit_train_batches": 0.4}, steps_per_round=2)
    with pytest.raises(UsageError, match=r"accumulate_grad_batches"):
        fit(module, trainer={"accumulate_grad_batches": 4}, steps_per_round=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradient_clip_val": 0.5}, "the module clips gradients itself, .* `gradient_clip_val`"),
        ({"gradient_clip_val": 0}, "the module clips gradients itself"),
        ({"gradient_clip_algorithm": "value"}, "by their norm"),
        ({"accumulate_grad_batches": 2}, "`micro_batch_tokens` sets the size"),
    ],
)
def test_what_the_module_does_itself_is_named(fit, tiny_model, given, said):
    module, ((name, value),) = GRPOModule(tiny_model), given.items()
    message = rf"`Trainer\({name}={value!r}\)`: .*{said}"
    with pytest.raises(UsageError, match=message):
        fit(module, trainer=given)
    assert module.model is None, "before anything was loaded"


@pytest.mark.parametrize(
    ("method", "loader", "data"),
    [
        ("fit", "train_dataloaders", "train"),
        ("validate", "dataloaders", "val"),
        ("test", "dataloaders", "test"),
        ("predict", "dataloaders", "predict"),
    ],
)
def test_a_loader_in_place_of_the_data_module(fit, tiny_model, method, loader, data):
    message = rf"`trainer.{method}\(module, datamodule=RolloutDataModule\({data}_data=prompts, "
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    for given in ([1, 2], LightningDataModule(), DataLoader([1, 2]), None):
        name = "datamodule" if isinstance(given, LightningDataModule) else loader
        with pytest.raises(UsageError, match=message):
            getattr(trainer, method)(GRPOModule(tiny_model), **{name: given})


def test_a_loader_for_a_trainer_that_has_had_a_data_module(fit, tiny_model):
    trainer, module, _ = fit(trainer={"max_epochs": 1})
    with pytest.raises(UsageError, match="`GRPOModule` takes completions, which a"):
        trainer.predict(module, dataloaders=[1, 2])


@pytest.mark.mostly_slow("True-2")
@pytest.mark.parametrize("steps_per_round", [1, 2])
@pytest.mark.parametrize("automatic", [True, False])
def test_every_round_has_its_figures_in_every_logger(
    fit, tiny_model, tmp_path, automatic, steps_per_round
):
    class Logs(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"loss": loss, "grad_norm": 1.0, "entropy": 1.0}, batch_size=1)
            return loss

    loggers = [CSVLogger(tmp_path / name) for name in "ab"]
    fit(
        Logs(tiny_model) if automatic else None,
        trainer={"logger": loggers, "max_epochs": 3},
        steps_per_round=steps_per_round,
    )
    for logger in loggers:
        with open(f"{logger.log_dir}/metrics.csv") as file:
            rows = [r for r in csv.DictReader(file) if r["loss"]]
        last = [steps_per_round * (i + 1) - 1 for i in range(3)]
        assert [int(row["step"]) for row in rows] == last
        assert all(row["grad_norm"] and row["entropy"] for row in rows)


def test_an_interval_of_none_is_left_alone(fit, tmp_path):
    logger = CSVLogger(tmp_path)
    trainer, _, _ = fit(trainer={"logger": logger, "log_every_n_steps": 0})
    assert trainer.log_every_n_steps == 0


def test_the_clock_goes_on_where_the_checkpoint_was_saved(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    first, resumed = Clock(), Clock()
    first.start()
    now[0] += 7
    saved = first.seconds
    now[0] += 1000  # killed; what came after the checkpoint is done again
    resumed.start()
    resumed.before = saved
    now[0] += 3
    resumed.stop()
    now[0] += 50
    assert resumed.seconds == 10
