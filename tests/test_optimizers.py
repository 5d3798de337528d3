"""AdamW: fused by one setting, clipped in every precision, without temporaries."""

from typing import Any

import pytest
import torch
from causal_families import FAMILIES, NOT_TINY, make_config
from lightning.pytorch.plugins.precision import MixedPrecision
from plain_module import Plain
from seen_rounds import At, gradient_norm, logged
from torch.nn import ParameterList
from transformers import AutoModelForCausalLM, Trainer

from lit_rlsched import GRPOModule
from lit_rlsched.cli.estimate import LiveBytes
from lit_rlsched.settings import UsageError
from lit_rlsched.training.optimizers import is_fused, keep_step, make_adamw

RETURNED = {
    "alone": lambda o, s: o,
    "list": lambda o, s: [o],
    "tuple": lambda o, s: (o,),
    "lists": lambda o, s: ([o], [s]),
    "no schedule": lambda o, s: ([o], []),
    "dictionary": lambda o, s: {"optimizer": o},
    "scheduler": lambda o, s: {"optimizer": o, "lr_scheduler": s},
    "interval": lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}},
    "frequency": lambda o, s: ([o], [{"scheduler": s, "interval": "step", "frequency": 3}]),
    "rounds": lambda o, s: ([o], [{"scheduler": s, "frequency": 2}]),
    "dictionaries": lambda o, s: [{"optimizer": o, "lr_scheduler": s}],
}
"""What Lightning accepts from `configure_optimizers`."""
HALVED = {
    "lists": [0, 0, 1, 1, 2, 2],
    "scheduler": [0, 0, 1, 1, 2, 2],
    "dictionaries": [0, 0, 1, 1, 2, 2],
    "interval": [0, 1, 2, 3, 4, 5],
    "frequency": [0, 0, 0, 1, 1, 1],
    "rounds": [0, 0, 0, 0, 1, 1],
}
"""How often the learning rate is halved before each of six steps, in rounds of two."""


class Own(GRPOModule):
    """With an optimizer of its own."""

    form = "alone"

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=64.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        return RETURNED[self.form](self.optimizer, scheduler)


@pytest.mark.mostly_slow("alone", "lists", "interval")
@pytest.mark.parametrize("form", RETURNED)
def test_every_form_of_configure_optimizers_trains(fit, tiny_model, form):
    steps, module = At(logged, "on_train_batch_end"), Own(tiny_model, gradient_clip_val=1e-3)
    module.form = form
    trainer, _, _ = fit(module, [steps], trainer={"max_epochs": 3}, steps_per_round=2)
    assert trainer.global_step == 6 and trainer.optimizers == [module.optimizer]
    rates = [row["learning_rate"] for row in steps.seen]
    assert rates == [64.0 / 2**n for n in HALVED.get(form, [0] * 6)]


def plateau(module: GRPOModule, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "reward"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (plateau, "`ReduceLROnPlateau` needs its `monitor`"),
        (lambda m, o: [o, torch.optim.SGD(m.parameters())], "returned 2 optimizers. The Trainer"),
        (lambda m, o: None, "returned no optimizer of the policy's weights"),
        (lambda m, o: torch.optim.SGD([torch.ones(1)]), "no optimizer of the policy's weights"),
    ],
)
def test_what_would_not_train_is_refused_before_a_round(fit, tiny_model, returned, said):
    class Returns(GRPOModule):
        def configure_optimizers(self) -> Any:
            return returned(self, torch.optim.SGD(self.parameters()))

        def on_round_start(self, plan: Any) -> None:
            raise AssertionError("a round was drawn")

    with pytest.raises(UsageError, match=said):
        fit(Returns(tiny_model))


@pytest.mark.filterwarnings("ignore")
def test_a_plateau_works_with_automatic_optimization(fit, tiny_model):
    class Reduced(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, "max", patience=0, threshold=10.0, factor=0.5
            )
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "reward"}

    trainer, _, _ = fit(Reduced(tiny_model), trainer={"max_epochs": 3})
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25e-6


class Fused(GRPOModule):
    """With a fused optimizer of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def scaled() -> dict[str, Any]:
    """`16-mixed`, which the Trainer's own argument turns into `bf16-mixed` on CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu")]}


@pytest.mark.mostly_slow("GRPOModule-adamw_torch-32-true", "Fused-None-bf16-mixed")
@pytest.mark.parametrize(
    ("make", "optim", "precision"),
    [
        (GRPOModule, "adamw_torch", "32-true"),
        *((GRPOModule, "adamw_torch_fused", p) for p in ("32-true", "bf16-mixed", "16-mixed")),
        *((Fused, None, p) for p in ("32-true", "bf16-mixed")),
    ],
)
def test_the_gradient_is_clipped(fit, tiny_model, make, optim, precision):
    norms = At(gradient_norm, "on_train_batch_end")
    module = make(tiny_model, optim=optim, learning_rate=1e-3, gradient_clip_val=0.01)
    trainer, _, _ = fit(
        module, [norms], trainer=scaled() if precision == "16-mixed" else {"precision": precision}
    )
    assert bool(trainer.optimizers[0].defaults["fused"]) == (optim != "adamw_torch")
    # unscaled too: its factor is 65,536
    assert 0.01 < trainer.callback_metrics["grad_norm"] < 100
    assert 0 < max(norms.seen) <= 0.01 * 1.001


def test_a_resumed_run_steps_as_it_says():
    """AdamW's state would bring the step of the run that wrote it."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    written = make_adamw(ParameterList([weight]), fused=False)
    written.step()
    checkpoint = {"optimizer_states": [written.state_dict()]}
    keep_step(checkpoint, fused=True)
    resumed = make_adamw(ParameterList([weight]), fused=True)
    resumed.load_state_dict(checkpoint["optimizer_states"][0])
    assert resumed.param_groups[0]["fused"]
    resumed.step()


@pytest.mark.mostly_slow("gemma3_text", "gpt2", "llama", "mixtral", "qwen3")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_TINY])
def test_what_decays_is_what_decays_in_transformers(family):
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(make_config(family))
    expected = {*Trainer.get_decay_parameter_names(None, policy)}
    optimizer = make_adamw(policy, fused=False, weight_decay=0.1)
    names = {id(p): name for name, p in policy.named_parameters() if p.requires_grad}
    found = {
        group["weight_decay"]: {names[id(p)] for p in group["params"]}
        for group in optimizer.param_groups
    }
    assert found[0.1] == expected & {*names.values()}
    assert found.get(0.0, set()) == {*names.values()} - expected
    (whole,) = make_adamw(policy, fused=False).param_groups
    assert len(whole["params"]) == len(names)


def test_a_fused_step_takes_no_memory():
    weight = torch.nn.Parameter(torch.zeros(1000, 10))
    weight.grad = torch.ones_like(weight)
    peaks = {}
    for fused in (True, False):
        optimizer = make_adamw(ParameterList([weight]), fused, lr=1e-3)
        optimizer.step()
        with LiveBytes() as live:
            optimizer.step()
        peaks[fused] = live.peak
    assert peaks[True] == 0
    assert peaks[False] >= weight.nbytes


def test_it_is_the_default_on_a_gpu():
    assert is_fused(None, "cuda") and not is_fused(None, "cpu")
    assert is_fused("adamw_torch_fused", "cpu") and not is_fused("adamw_torch", "cuda")
