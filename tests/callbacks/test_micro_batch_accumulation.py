import torch
from plain_module import Plain
from seen_rounds import vector

from lit_rlsched import GRPOModule
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
