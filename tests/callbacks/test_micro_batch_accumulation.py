import pytest
import torch
from plain_module import Plain
from seen_rounds import Rounds, vector

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import SortedBatching
from lit_rlsched.run.trainer import MicroBatchAccumulation


def partial():
    return [SortedBatching(3, mode="partial", mask_stale_tokens=True)]


@pytest.mark.mostly_slow("list-settings0")
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (list, {"micro_batch_tokens": 64, "steps_per_round": 2}),
        (partial, {"micro_batch_tokens": 128, "max_completion_length": 64}),
    ],
)
def test_a_plain_module_is_trained_as_ours_is(fit, tiny_model, make, settings):
    """Same rounds, same steps, same clipping: the same weights but for the order of sums."""
    double = {"precision": "64-true", "max_epochs": 4}
    clipped = {**double, "gradient_clip_val": 1.0}
    callbacks = [theirs := Rounds(), MicroBatchAccumulation(), *make()]
    trainer, plain, _ = fit(Plain(tiny_model), callbacks, trainer=clipped, **settings)
    ours, seen = GRPOModule(tiny_model, learning_rate=1e-3), Rounds()
    reference, ours, _ = fit(ours, [seen, *make()], trainer=double, **settings)
    assert trainer.global_step == reference.global_step == 4 * settings.get("steps_per_round", 1)
    assert theirs.drawn == seen.drawn
    segments = {len(c.segments) for round in seen.rounds for c in round.completions}
    assert (max(segments) > 1) == (make is partial)
    torch.testing.assert_close(vector(plain.lm), vector(ours.model), rtol=0, atol=1e-6)
    assert trainer.accumulate_grad_batches == 1
