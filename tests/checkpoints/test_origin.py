"""Adapters go on with their base and the KL with its reference, or the run is refused."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lora_policy import peft
from transformers import AutoConfig, AutoModelForCausalLM

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.run.saving.export import export
from lit_rlsched.run.saving.resuming import origin
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import load_policy

SMALL = {"num_generations": 2, "prompts_per_round": 1, "max_completion_length": 4}


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """The model, the same in another folder, two changed ones, and adapters."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_model, folder / "moved")
    shutil.copytree(tiny_model, folder / "turned")
    config = AutoConfig.from_pretrained(tiny_model)
    config.rope_parameters["rope_theta"] *= 2
    config.save_pretrained(folder / "turned")
    shutil.copytree(tiny_model, folder / "other")
    model = AutoModelForCausalLM.from_pretrained(folder / "other", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3] *= 1.02
    model.save_pretrained(folder / "other")
    for base in (tiny_model, folder / "other"):
        for seed in (0, 1):
            torch.manual_seed(seed)
            config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")
            policy = peft.get_peft_model(load_policy(str(base)), config)
            policy.save_pretrained(folder / f"adapter {seed} on {base == tiny_model}")
    return {
        "model": tiny_model,
        **{name: str(folder / name) for name in ("moved", "other", "turned")},
        "adapter": str(folder / "adapter 0 on True"),
        "other adapter": str(folder / "adapter 1 on True"),
        "adapter on other": str(folder / "adapter 0 on False"),
    }


LORA, KL = {"lora_rank": 2}, {"beta": 0.1}
BASE = {**KL, "reference_model": "base"}


@pytest.mark.mostly_slow(
    "before0-after0-None",
    "before2-after2-the model under its adapters",
    "before3-after3-`lora_alpha=32`, those of",
    "before7-after7-reference model of its KL",
)
@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (("model", LORA), ("moved", LORA), None),
        (("model", LORA), ("other", LORA), "the model under its adapters"),
        (("model", LORA), ("turned", LORA), "the model under its adapters"),
        (("model", LORA), ("model", {**LORA, "lora_alpha": 8}), "`lora_alpha=32`, those of"),
        (("model", {}), ("other", {}), None),  # the weights of the checkpoint replace it
        (("model", KL), ("moved", KL), None),
        (("model", KL), ("other", KL), r"reference model of its KL \(`beta=0\.1`\)"),
        (("model", KL), ("turned", KL), "reference model of its KL"),
        (("model", KL), ("other", {}), None),
        (("model", {**LORA, **KL}), ("other", {**LORA, **KL}), "the model under its adapters"),
        (("adapter", KL), ("adapter", KL), None),
        (("adapter", KL), ("other adapter", KL), "reference model of its KL"),
        (("adapter", KL), ("other adapter", {}), None),
        (("adapter", KL), ("adapter", BASE), "reference model of its KL"),
        (("adapter", BASE), ("other adapter", BASE), None),
        (("adapter", {}), ("adapter on other", {}), "the model under its adapters"),
    ],
)
def test_another_base_or_reference_is_refused(fit, models, tmp_path, before, after, refused):
    model, settings = before
    trainer, _, _ = fit(GRPOModule(models[model], **settings), trainer={"max_epochs": 1}, **SMALL)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    model, settings = after

    def resume():
        module = GRPOModule(models[model], **settings)
        return fit(module, trainer={"max_epochs": 2}, ckpt_path=tmp_path / "saved.ckpt", **SMALL)

    if refused:
        with pytest.raises(UsageError, match=refused):
            resume()
    else:
        assert resume()[0].global_step == 2


@pytest.mark.mostly_slow("bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_precision_of_the_run_may_change(fit, models, tmp_path, precision):
    lora = {"lora_rank": 2, "beta": 0.1}
    trainer, _, _ = fit(RLOOModule(models["model"], **lora), trainer={"max_epochs": 1}, **SMALL)
    trainer.save_checkpoint(path := tmp_path / "saved.ckpt")
    more = {"max_epochs": 2, "precision": precision}
    fit(RLOOModule(models["moved"], **lora), trainer=more, ckpt_path=path, **SMALL)
    with pytest.raises(UsageError, match="the model under its adapters"):
        fit(RLOOModule(models["other"], **lora), trainer=more, ckpt_path=path, **SMALL)


def test_what_a_full_run_began_with_is_not_forgotten(fit, models, tmp_path):
    """A run that goes on without its KL, from another folder, and then with it."""
    path = tmp_path / "saved.ckpt"
    trainer, _, _ = fit(GRPOModule(models["model"], **KL), trainer={"max_epochs": 1}, **SMALL)
    trainer.save_checkpoint(path)
    more = {"ckpt_path": path, **SMALL}
    trainer, _, _ = fit(GRPOModule(models["other"]), trainer={"max_epochs": 2}, **more)
    trainer.save_checkpoint(path)
    with pytest.raises(UsageError, match="reference model of its KL"):
        fit(GRPOModule(models["other"], **KL), trainer={"max_epochs": 3}, **more)
    trainer, _, _ = fit(GRPOModule(models["model"], **KL), trainer={"max_epochs": 3}, **more)
    assert trainer.global_step == 3


def test_what_a_checkpoint_does_not_say_is_warned_of(fit, models, tmp_path):
    """A run without a KL has no reference model; the one that goes on has."""
    path = tmp_path / "saved.ckpt"
    trainer, _, _ = fit(GRPOModule(models["model"]), trainer={"max_epochs": 1}, **SMALL)
    trainer.save_checkpoint(path)
    with pytest.warns(UserWarning, match="does not say what its run began with"):
        fit(
            GRPOModule(models["model"], **KL),
            trainer={"max_epochs": 2},
            ckpt_path=path,
            **SMALL,
        )


def test_adapters_are_not_merged_into_another_base(models, saved, tmp_path):
    path = saved(GRPOModule(models["model"], lora_rank=2))
    export(path, str(tmp_path / "same"), model=models["moved"])
    with pytest.raises(UsageError, match=r"trained on another model than `.*other`"):
        export(path, str(tmp_path / "wrong"), model=models["other"])
    assert not (tmp_path / "wrong").exists()


@given(seed=st.integers(0, 9999))
def test_every_weight_counts(policy, seed):
    names, same = [name for name, _ in policy.named_parameters()], origin(policy)
    weight = dict(policy.named_parameters())[names[seed % len(names)]]
    place = seed % weight.numel()
    before = weight.data.view(-1)[place].clone()
    weight.data.view(-1)[place] += 1.0
    assert origin(policy)["base"] != same["base"]
    weight.data.view(-1)[place] = before
    assert origin(policy) == same


@pytest.fixture(scope="module")
def policy(tiny_model):
    return load_policy(tiny_model)
