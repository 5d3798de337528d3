"""AdamW: fused by one setting, clipped in every precision, without temporaries."""

from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_rlsched import GRPOModule
from lit_rlsched.estimate.live import LiveBytes
from lit_rlsched.training.optimizers import is_fused, keep_step, make_adamw


class Norms(Callback):
    """Of the gradient as the optimizer took it."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        grads = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(grads).norm()))


def scaled() -> dict[str, Any]:
    """`16-mixed`, which the Trainer's own argument turns into `bf16-mixed` on CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu")]}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_fused_step_is_clipped(fit, tiny_model, precision):
    norms = Norms()
    module = GRPOModule(
        tiny_model, optim="adamw_torch_fused", learning_rate=1e-3, gradient_clip_val=0.01
    )
    trainer, _, _ = fit(
        module, [norms], trainer=scaled() if precision == "16-mixed" else {"precision": precision}
    )
    assert trainer.optimizers[0].defaults["fused"]
    # unscaled too: its factor is 65,536
    assert 0.01 < trainer.callback_metrics["grad_norm"] < 100
    assert 0 < max(norms.norms) <= 0.01 * 1.001


def test_a_resumed_run_steps_as_it_says():
    """AdamW's state would bring the step of the run that wrote it."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    written = make_adamw([weight], fused=False)
    written.step()
    checkpoint = {"optimizer_states": [written.state_dict()]}
    keep_step(checkpoint, fused=True)
    resumed = make_adamw([weight], fused=True)
    resumed.load_state_dict(checkpoint["optimizer_states"][0])
    assert resumed.param_groups[0]["fused"]
    resumed.step()


def test_a_fused_step_is_that_of_the_other():
    steps = []
    for fused in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(8, 4)), torch.nn.Parameter(torch.randn(3))]
        optimizer = make_adamw(weights, fused, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        steps.append(weights)
    for ours, other in zip(*steps, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)


def test_a_fused_step_takes_no_memory():
    weight = torch.nn.Parameter(torch.zeros(1000, 10))
    weight.grad = torch.ones_like(weight)
    peaks = {}
    for fused in (True, False):
        optimizer = make_adamw([weight], fused, lr=1e-3)
        optimizer.step()
        with LiveBytes() as live:
            optimizer.step()
        peaks[fused] = live.peak
    assert peaks[True] == 0
    assert peaks[False] >= weight.nbytes


def test_it_is_the_default_on_a_gpu():
    assert is_fused(None, "cuda") and not is_fused(None, "cpu")
    assert is_fused("adamw_torch_fused", "cpu") and not is_fused("adamw_torch", "cuda")


def test_another_name_is_refused(tiny_model):
    with pytest.raises(ValueError, match="`optim='adamw_8bit'` is unknown"):
        GRPOModule(tiny_model, optim="adamw_8bit")
