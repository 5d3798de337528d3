from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rlsched.callbacks import RNGState, RolloutCallback, RoundCheckpoint
from lit_rlsched.cli.summary import next_commands
from lit_rlsched.run.interrupts import check_interrupt
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO, read_checkpoint
from lit_rlsched.run.saving.run_folder import newest_checkpoint


class Clock(RolloutCallback):
    """A round takes 10 seconds, a save so many; it also notes which rounds were saved."""

    def __init__(self, callback, save):
        self.now, self.save, self.saved = 0.0, save, []
        callback._clock = lambda: self.now

    def on_round_end(self, trainer, pl_module, round):
        self.now += 10.0

    def state_dict(self):  # asked once in each save
        self.now += self.save
        return {}

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved.append(trainer.datamodule.run.rounds_over)


def run(fit, save, epochs, *more, **settings):
    callback = RoundCheckpoint(**settings)
    clock = Clock(callback, save)
    trainer, *_ = fit(
        callbacks=[clock, *more, callback],
        trainer={"max_epochs": epochs, "enable_checkpointing": True},
    )
    return trainer, clock


def files(folder: Path):
    return sorted(path.name for path in (folder / "checkpoints").glob("round_*"))


def test_saves_after_the_first_round_and_the_last_and_within_its_share_between(fit, tmp_path):
    _, clock = run(fit, save=0.3, epochs=6)
    assert clock.saved == [1, 3, 5, 6]  # 0.6 s are 2 % of 30 s; the last is saved in any case
    assert files(tmp_path) == ["round_00005-step_000005.ckpt", "round_00006-step_000006.ckpt"]


def test_a_cheap_save_is_made_after_every_round(fit, tmp_path):
    _, clock = run(fit, save=0.1, epochs=4, keep=3)
    assert clock.saved == [1, 2, 3, 4] and len(files(tmp_path)) == 3


def test_nothing_is_saved_twice(fit, tmp_path):
    _, clock = run(
        fit, 0.0, 4, ModelCheckpoint(tmp_path / "mine", save_last=True, every_n_epochs=2)
    )
    assert [n for n in clock.saved if clock.saved.count(n) == 1] == [1, 3]
    assert files(tmp_path) == ["round_00001-step_000001.ckpt", "round_00003-step_000003.ckpt"]


def test_the_best_checkpoint_is_not_saved_twice_and_can_be_gone_on_with(fit, tmp_path, sums):
    def train(epochs, *more, ckpt_path=None):
        trainer = {"max_epochs": epochs, "enable_checkpointing": True}
        trainer |= {"check_val_every_n_epoch": 2}
        best = ModelCheckpoint(tmp_path / "best", monitor="val/reward", mode="max", save_top_k=-1)
        callbacks = [RNGState(), *more, best, callback := RoundCheckpoint(keep=9)]
        held_out = {"val_data": sums[80:84], "val_num_generations": 1}
        run = fit(callbacks=callbacks, trainer=trainer, ckpt_path=ckpt_path, **held_out)
        return *run, next_commands(run[0]), callback

    *_, commands, first = train(2)
    assert files(tmp_path) == ["round_00001-step_000001.ckpt"]
    assert first.last_path.name == files(tmp_path)[0]
    saved = newest_checkpoint(tmp_path)
    assert saved.parent.name == "best" and f"--ckpt_path {saved}" in commands[0]
    _, resumed, data, *_ = train(4, ckpt_path=saved)
    curve = [(row["round"], row["entropy"]) for row in data.run.record.rounds]
    _, whole, other, *_ = train(4)
    assert (
        data.run.counters == other.run.counters
        and data.run.rounds_over == other.run.rounds_over == 4
    )
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    assert curve == [(row["round"], row["entropy"]) for row in other.run.record.rounds]


def test_a_file_that_cannot_be_gone_on_with_does_not_count(fit, tmp_path):
    run(fit, 0.0, 1, ModelCheckpoint(tmp_path / "mine", save_weights_only=True, save_last=True))
    assert files(tmp_path) == ["round_00001-step_000001.ckpt"]


class Stop(RolloutCallback):
    """Asks the run to stop at a place of round 1, as SIGTERM does; notes the loggers' steps."""

    def __init__(self, place=None):
        self.place, self.steps = place, []

    def stop(self, trainer, place):
        if place == self.place and trainer.datamodule.run.num_rounds == 1:
            trainer._signal_connector.received_sigterm = True
            check_interrupt(trainer)

    def on_completion_end(self, trainer, pl_module, completion):
        self.stop(trainer, "rollout")

    def on_round_end(self, trainer, pl_module, round):
        self.steps.append(trainer.fit_loop.epoch_loop._batches_that_stepped)
        self.stop(trainer, "before the first step")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx:
            self.stop(trainer, "before the second step")


PLACES = ["rollout", "before the first step", "before the second step"]


@pytest.mark.mostly_slow("before the second step")
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_was_stopped_loses_no_round_and_counts_no_step_twice(fit, tmp_path, place):
    def train(stop, ckpt_path=None):
        trainer = {"max_epochs": 4, "enable_checkpointing": True}
        callbacks = [RNGState(), stop, RoundCheckpoint()]
        settings = {"prompts_per_round": 4, "steps_per_round": 2}
        return fit(callbacks=callbacks, trainer=trainer, ckpt_path=ckpt_path, **settings)

    with pytest.raises(SIGTERMException):
        train(Stop(place))
    rest = Stop()
    trainer, resumed, data = train(rest, newest_checkpoint(tmp_path))
    assert data.run.rounds_over == trainer.current_epoch == 4 and trainer.global_step == 8
    assert rest.steps == ([2, 4, 6] if place == "rollout" else [4, 6])
    _, whole, _ = train(Stop())
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(fit, tmp_path):
    class Full(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if "step_000001" not in str(path):
                raise OSError(28, "No space left on device", str(path))
            super().save_checkpoint(checkpoint, path)

    with pytest.warns(
        UserWarning, match=r"No checkpoint was saved, and the run continues: .*No space"
    ):
        trainer, *_ = fit(
            callbacks=[RoundCheckpoint()],
            trainer={"max_epochs": 3, "enable_checkpointing": True, "plugins": [Full()]},
        )
    assert trainer.global_step == 3
    (name,) = files(tmp_path)
    assert read_checkpoint(tmp_path / "checkpoints" / name)["global_step"] == 1


def test_saves_nothing_on_fast_dev_run(fit, tmp_path):
    fit(
        callbacks=[RoundCheckpoint()],
        trainer={"fast_dev_run": True, "enable_checkpointing": True},
    )
    assert not (tmp_path / "checkpoints").exists()
