import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_module import Plain
from seen_rounds import vector

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import RNGState
from lit_rlsched.run.trainer import MicroBatchAccumulation


def test_a_plain_module_is_trained_as_ours_is(fit, tiny_model):
    """Same rounds, same steps, same clipping: the same weights but for the order of sums."""
    double = {"precision": "64-true", "max_epochs": 3}
    clipped = {**double, "gradient_clip_val": 1.0}
    settings = {"micro_batch_tokens": 64, "steps_per_round": 2}
    trainer, plain, _ = fit(
        Plain(tiny_model), [MicroBatchAccumulation()], trainer=clipped, **settings
    )
    ours = GRPOModule(tiny_model, learning_rate=1e-3)
    reference, ours, _ = fit(ours, trainer=double, **settings)
    assert trainer.global_step == reference.global_step == 6
    torch.testing.assert_close(vector(plain.lm), vector(ours.model), rtol=0, atol=1e-6)
    assert trainer.accumulate_grad_batches == 1


@pytest.mark.slow
def test_stopped_in_the_middle_of_a_round_and_resumed(fit, tiny_model, tmp_path):
    settings = {"micro_batch_tokens": 64, "steps_per_round": 2}

    def callbacks(folder):
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
        return [RNGState(), MicroBatchAccumulation(), checkpoint]

    def run(folder, max_steps, ckpt_path=None):
        trainer = {"max_steps": max_steps, "max_epochs": -1, "enable_checkpointing": True}
        made = callbacks(folder)
        return fit(Plain(tiny_model), made, trainer=trainer, ckpt_path=ckpt_path, **settings)

    _, whole, _ = run(tmp_path / "whole", 6)
    run(tmp_path / "part", 3)
    trainer, resumed, data = run(tmp_path / "part", 6, ckpt_path=tmp_path / "part" / "last.ckpt")
    assert trainer.global_step == 6
    assert data.run.counters["num_completions"] == 48
    assert torch.equal(vector(whole.lm), vector(resumed.lm))
