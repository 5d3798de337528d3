"""A LoRA adapter as `model`: it is trained further, in every part of a run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from character_tokenizer import make_tokenizer
from lora_policy import change, peft
from transformers import AutoModelForCausalLM

from lit_rlsched import GRPOModule
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.run.saving.export import export
from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import load_policy, load_tokenizer

IDS = torch.arange(4, 64).view(3, 20)
LORA = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.5}
RICH = {**LORA, "use_rslora": True, "init_lora_weights": "gaussian"}
"""What the three `lora_*` settings cannot say."""


@pytest.fixture
def adapter(tmp_path):
    """Save a random adapter of a base; return the folder."""

    def adapter(base, **settings):
        settings = {"target_modules": "all-linear", **LORA, **settings}
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            policy = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
            change(policy, 0.2)
        policy.save_pretrained(tmp_path / "adapter")
        return str(tmp_path / "adapter")

    return adapter


def logprobs(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits.log_softmax(-1)


def same(model, other, atol=1e-4):
    torch.testing.assert_close(logprobs(model), logprobs(other), atol=atol, rtol=0)


def by_peft(folder):
    return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def configured(folder, **settings):
    module = GRPOModule(folder, **settings)
    module.configure_model()
    return module


@pytest.mark.parametrize("settings", [LORA, RICH | {"rank_pattern": {"c_proj": 2}}])
@pytest.mark.parametrize("base", ["tiny_model", "exact_model"])
def test_training_starts_at_the_adapter(base, settings, adapter, request):
    folder = adapter(base := request.getfixturevalue(base), **settings)
    module = configured(folder, gradient_checkpointing=True)
    same(module.model, by_peft(folder))
    assert (logprobs(module.model) - logprobs(load_policy(base))).abs().max() > 0.1
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert base_model(module.model).name_or_path == base  # what an engine loads
    assert (module.hparams.lora_rank, module.hparams.lora_alpha) == (4, 6)


@pytest.mark.parametrize("engine", ["TransformersEngine", "merged", "alone"])
@pytest.mark.mostly_slow("TransformersEngine")
def test_a_run_goes_on_with_it(engine, adapter, fit, saved, tiny_model, tmp_path):
    """With its own start as the reference, resumed, loaded and exported."""
    engines = {
        "merged": {"engine": VLLMEngine()},
        "alone": {"engine": VLLMEngine(enable_lora=True)},
    }
    folder = adapter(tiny_model, **RICH, target_modules=["q_proj", "down_proj"])
    start = by_peft(folder)

    def run(epochs, rate=1e-2, reference="initial", **more):
        settings = {"learning_rate": rate, "beta": 0.05, "reference_model": reference}
        module, trainer = GRPOModule(folder, **settings), {"max_epochs": epochs}
        return fit(module, trainer=trainer, **engines.get(engine, {}), **more)

    trainer, module, _ = run(1, rate=0.0)
    assert trainer.callback_metrics["kl"] == 0
    assert trainer.callback_metrics["sampling/sampling_logp_difference/max"] < 1e-3
    assert run(1, rate=0.0, reference="base")[0].callback_metrics["kl"] > 0.01
    same(module.model, start)
    trainer, module, _ = run(2)
    trainer.save_checkpoint(path := tmp_path / "two.ckpt")
    trainer, whole, _ = run(3)
    assert trainer.callback_metrics["kl"] > 1e-3
    trainer, resumed, _ = run(3, ckpt_path=path)
    same(resumed.model, whole.model, 1e-3 if engine == "alone" else 1e-4)
    trainer.save_checkpoint(path)
    same(GRPOModule.load_from_checkpoint(path).model, resumed.model)
    shutil.rmtree(folder)  # the checkpoint has all but the base
    merged = export(str(path), str(tmp_path / "merged"), model=tiny_model)
    same(load_policy(str(merged)), resumed.model)
    alone = export(str(path), str(tmp_path / "alone"), adapter=True, model=tiny_model)
    same(by_peft(alone), resumed.model)
    config = json.loads((alone / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny_model and config["use_rslora"]
    assert config["lora_dropout"] == 0.5
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]


def test_the_tokenizer_is_the_adapters_or_that_of_its_base(adapter, fit, tiny_model):
    folder = adapter(tiny_model)
    assert load_tokenizer(folder).chat_template == load_tokenizer(tiny_model).chat_template
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    settings = {"trainer": {"max_epochs": 1}, "prompts_per_round": 1}
    _, _, data = fit(GRPOModule(folder), train_data=rows, **settings)
    assert data.run.startup.decode(data.run.startup.prompts.train[0].token_ids) == "1+1!"


REFUSED = {
    "rank": ({}, {"lora_rank": 8}, "`lora_rank=8`, but `model=.*adapter` is an adapter with 4. Le"),
    "alpha": ({}, {"lora_alpha": 32}, "`lora_alpha=32`, but .* an adapter with 6"),
    "targets": (
        {},
        {"lora_target_modules": ["k_proj"]},
        "is an adapter with ..model.layers.0.mlp.down",
    ),
    "dora": ({"use_dora": True}, {}, "its adapter has `use_dora=True`.* Merge it into its base"),
    "tokens": ({"trainable_token_indices": [3]}, {}, "trainable_token_indices=.3.`"),
    "modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save=.'lm_head'.`"),
    "bias": ({"bias": "all"}, {}, "`bias='all'`"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("lora", "settings", "said"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_lost_is_refused(lora, settings, said, adapter, tiny_model_untied):
    with pytest.raises(UsageError, match=said):
        configured(adapter(tiny_model_untied, **lora), **settings)


@pytest.mark.parametrize("given", [{"lora_alpha": 8}, {"lora_target_modules": ["q_proj"]}])
def test_settings_of_adapters_are_refused_where_there_are_none(given, tiny_model):
    (name,) = given
    with pytest.raises(UsageError, match=f"`{name}=.* has no effect with `lora_rank=0`"):
        configured(tiny_model, **given)
    assert configured(tiny_model, lora_rank=2, **given).hparams[name] == given[name]


def test_settings_that_are_the_adapters_are_taken(adapter, tiny_model):
    folder = adapter(tiny_model, target_modules=["v_proj", "q_proj"])
    given = {"lora_rank": 4, "lora_alpha": 6, "lora_target_modules": ["q_proj", "v_proj"]}
    same(configured(folder, **given).model, by_peft(folder))


def edit(folder, **changes):
    path = Path(folder, "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_is_not_whole_is_refused(adapter, tiny_model, exact_model, tmp_path):
    edit(folder := adapter(tiny_model), base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"has `base_model_name_or_path=.*no such folder.* moved"):
        load_policy(folder)
    edit(folder, base_model_name_or_path=tiny_model, r=2)
    with pytest.raises(UsageError, match="do not fit its config and base"):
        load_policy(folder)
    edit(folder, r=4, target_modules=["q_proj"])
    with pytest.raises(UsageError, match="missing or left over, the first is"):
        load_policy(folder)
    edit(folder, peft_type="IA3")
    with pytest.raises(UsageError, match=r"has the type .*IA3.*, and only LoRA"):
        load_policy(folder)
    edit(folder, peft_type="LORA")
    shutil.copy(Path(exact_model, "model.safetensors"), folder)
    with pytest.raises(UsageError, match="holds a model and an adapter"):
        load_policy(folder)


def test_an_adapter_of_an_adapter_is_refused(adapter, tiny_model, tmp_path):
    first = shutil.move(adapter(tiny_model), tmp_path / "first")
    edit(folder := adapter(tiny_model), base_model_name_or_path=str(first))
    with pytest.raises(
        ValueError, match=r"adapter of `.*first`, which is an adapter itself. Merge"
    ):
        load_policy(folder)
