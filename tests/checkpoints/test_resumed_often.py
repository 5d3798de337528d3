"""Runs that are stopped and resumed several times have as many rounds as one that is not."""

from contextlib import suppress

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_module import Plain
from seen_rounds import Rounds, vector

from lit_rlsched.callbacks import RNGState, RoundCheckpoint
from lit_rlsched.run.saving.run_folder import newest_checkpoint


class Stopped(Exception):
    pass


class Stop(Rounds):
    """Raise where the round after so many steps begins."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_round_start(self, trainer, pl_module, plan):
        if trainer.global_step == self.step:
            raise Stopped


SAVES = {
    "after each step": lambda folder: ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1),
    "after each epoch": lambda folder: ModelCheckpoint(
        folder, save_top_k=-1, save_on_train_epoch_end=True
    ),
    "after each round": lambda folder: RoundCheckpoint(str(folder), max_share=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("saves", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize(("steps", "automatic"), [(1, False), (2, False), (1, True)])
def test_a_run_resumed_again_and_again_has_as_many_rounds(
    fit, tmp_path, tiny_model, saves, steps, automatic
):
    def run(stop, folder, path=None):
        rounds = Stop(stop)
        settings = {
            "max_epochs": 4,
            "enable_checkpointing": True,
            "default_root_dir": folder,
        }
        callbacks = [rounds, RNGState(), saves(folder)]
        trainer = module = None
        with suppress(Stopped):
            trainer, module, _ = fit(
                Plain(tiny_model) if automatic else None,
                callbacks=callbacks,
                trainer=settings,
                ckpt_path=path,
                steps_per_round=steps,
            )
        return trainer, module, [round.number for round in rounds.rounds]

    _, whole, _ = run(-1, tmp_path / "whole")
    numbers, path = [], None
    for stop in (steps, 2 * steps, 3 * steps, -1):
        trainer, module, seen = run(stop, tmp_path / "stopped", path)
        numbers += seen
        path = newest_checkpoint(tmp_path / "stopped")
    assert numbers == [0, 1, 2, 3]
    assert (trainer.global_step, trainer.current_epoch) == (4 * steps, 4)
    assert vector(module) == pytest.approx(vector(whole), abs=0)
