"""The optimizer's state goes to the weights it belongs to, whatever a resumed run has changed."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from seen_rounds import At
from torch.optim import SGD, Adam, AdamW

from lit_rlsched import GRPOModule
from lit_rlsched.run.advice import _OPTIMIZER_KEYS
from lit_rlsched.settings import UsageError

SMALL = {"num_generations": 2, "prompts_per_round": 1, "max_completion_length": 4}
CHANGES: dict[str, list[tuple[Any, Any]]] = {
    "learning_rate": [(1e-3, 1e-2)],
    "betas": [((0.9, 0.999), (0.8, 0.9))],
    "weight_decay": [(0.0, 0.1), (0.1, 0.0), (0.1, 0.2)],
    "optim": [("adamw_torch", "adamw_torch_fused"), ("adamw_torch_fused", "adamw_torch")],
    "warmup_steps": [(0, 4), (4, 0)],
    "lr_scheduler_type": [("constant", "linear")],
    "gradient_clip_val": [(1.0, None)],
}
"""Each setting of the optimizer, and values before and after a resume."""


def moments(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    state = trainer.optimizers[0].state
    return {name: state[p]["exp_avg"] for name, p in module.named_parameters() if p in state}


def settings_of(trainer: Any, module: Any) -> dict[str, dict[str, Any]]:
    """Settings of the group that a weight is in, by the name of the weight."""
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        names[id(p)]: {key: group.get(key) for key in ("weight_decay", "betas", "initial_lr", "lr")}
        for group in trainer.optimizers[0].param_groups
        for p in group["params"]
    }


@pytest.fixture
def save(fit, tmp_path):
    def save(module, *callbacks, epochs=1, path=tmp_path / "saved.ckpt"):
        trainer, _, _ = fit(module, callbacks, {"max_epochs": epochs}, **SMALL)
        trainer.save_checkpoint(path)
        return path, moments(trainer, module), settings_of(trainer, module)

    return save


@pytest.fixture
def resume(fit):
    def resume(module, path, *callbacks, epochs=1):
        """With as many epochs as the checkpoint has, the state is loaded and nothing trained."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer, _, _ = fit(module, callbacks, {"max_epochs": epochs}, path, **SMALL)
        return trainer, [str(warning.message) for warning in caught]

    return resume


@pytest.mark.mostly_slow(
    "learning_rate-0.001-0.01", "weight_decay-0.0-0.1", "lr_scheduler_type-constant-linear"
)
@pytest.mark.parametrize(
    ("name", "before", "after"), [(name, *pair) for name in CHANGES for pair in CHANGES[name]]
)
def test_a_changed_setting_holds_or_a_warning_says_that_it_does_not(
    tiny_model, save, resume, name, before, after
):
    path, state, groups = save(GRPOModule(tiny_model, **{name: before}))
    module = GRPOModule(tiny_model, **{name: after})
    trainer, said = resume(module, path)
    assert all(torch.equal(state[n], found) for n, found in moments(trainer, module).items())
    assert settings_of(trainer, module) == groups
    told = [text for text in said if "will have no effect" in text]
    assert len(told) == (name in _OPTIMIZER_KEYS) and all(f"`{name}=" in text for text in told)
    trainer, _ = resume(GRPOModule(tiny_model, **{name: after}), path, epochs=2)
    assert trainer.global_step == 2
    assert len({group["lr"] for group in trainer.optimizers[0].param_groups}) == 1


@pytest.mark.parametrize(("before", "after"), [(SGD, AdamW), (AdamW, SGD), (Adam, AdamW)])
def test_the_state_of_another_optimizer_is_refused(tiny_model, save, resume, before, after):
    def made(kind):
        class Own(GRPOModule):
            def configure_optimizers(self) -> Any:
                return kind(self.parameters(), lr=1e-3)

        return Own(tiny_model)

    path, *_ = save(made(before))
    said = rf"optimizer `{before.__name__}`, and this run has `{after.__name__}`"
    with pytest.raises(UsageError, match=said):
        resume(made(after), path)


class Thaws(BaseFinetuning):
    """Trains the first layer from a round on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.model.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.at:
            layer = pl_module.model.model.layers[0]
            self.unfreeze_and_add_param_group(layer, optimizer, lr=1e-3)


def test_other_weights_are_trained_after_a_resume(tiny_model, save, resume):
    frozen, before, _ = save(GRPOModule(tiny_model, weight_decay=0.1), Thaws(9))
    module = GRPOModule(tiny_model, weight_decay=0.1)
    trainer, said = resume(module, frozen)
    found = moments(trainer, module)
    assert found.keys() == before.keys() < settings_of(trainer, module).keys()
    assert all(torch.equal(found[name], before[name]) for name in found)
    assert any("are trained now, with a new state" in text for text in said)
    after = settings_of(trainer, module)
    assert after["model.model.layers.0.mlp.up_proj.weight"]["weight_decay"] == 0.1
    assert after["model.model.layers.0.input_layernorm.weight"]["weight_decay"] == 0.0
    trainer, _ = resume(GRPOModule(tiny_model, weight_decay=0.1), frozen, epochs=2)
    assert trainer.global_step == 2

    whole, before, _ = save(GRPOModule(tiny_model))
    module = GRPOModule(tiny_model)
    trainer, said = resume(module, whole, Thaws(9))
    found = moments(trainer, module)
    assert found.keys() == settings_of(trainer, module).keys() < before.keys()
    assert all(torch.equal(found[name], before[name]) for name in found)
    assert any("are trained no more" in text for text in said)


@pytest.mark.mostly_slow("True")
@pytest.mark.parametrize("thawed", [True, False])
def test_layers_that_were_thawed_stay_so(tiny_model, save, resume, thawed):
    """Whether the run stopped before or after the thaw, it goes on as if it had not."""
    settings, epochs = {"learning_rate": 1e-3, "weight_decay": 0.1}, 2 if thawed else 1
    whole = GRPOModule(tiny_model, **settings)
    *_, groups = save(whole, Thaws(1), epochs=4)
    path, *_ = save(GRPOModule(tiny_model, **settings), Thaws(1), epochs=epochs)
    resumed = GRPOModule(tiny_model, **settings)
    trainer, _ = resume(resumed, path, Thaws(1), epochs=4)
    assert all(p.requires_grad for p in resumed.parameters())
    assert settings_of(trainer, resumed) == groups
    for (name, ours), other in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, other), name


class Whole(GRPOModule):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-3)


def test_layers_that_an_optimizer_has_but_nothing_thawed_stay_frozen(
    tiny_model, save, resume, tmp_path
):
    path = tmp_path / "in the run.ckpt"
    keep = At(lambda trainer, *_: trainer.save_checkpoint(path), "on_train_epoch_end")
    save(Whole(tiny_model), Thaws(9), keep)
    module = Whole(tiny_model)
    resume(module, path, Thaws(9), epochs=2)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen and all(name.startswith("model.model.layers.0.") for name in frozen)
