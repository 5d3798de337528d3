"""The optimizer's state goes to the weights it belongs to, whatever a resumed run has changed."""

import warnings
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("frozen", [True, False])
def test_the_state_of_other_weights_is_refused(tiny_model, save, resume, frozen):
    class Frozen(GRPOModule):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.get_input_embeddings().requires_grad_(False)

    kinds = (Frozen, GRPOModule) if frozen else (GRPOModule, Frozen)
    before, after = (kind(tiny_model) for kind in kinds)
    path, *_ = save(before)
    with pytest.raises(UsageError, match=r"while other weights were trained: 1 differ.*embed"):
        resume(after, path)
