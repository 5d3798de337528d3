"""A model that is given as an object is the one that is trained, or it is refused."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlsched import trl as ours
from lit_rlsched.settings import UsageError

IDS = torch.tensor([[14, 15, 16, 20]])


@pytest.fixture
def trainer(tmp_path):
    def make(model, tokenizer=None, **others):
        args = ours.GRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, max_steps=1)
        rows = [{"prompt": "1+"}] * 9
        made = ours.GRPOTrainer(model, len, args, rows, processing_class=tokenizer, **others)
        made.module.configure_model()
        return made

    return make


def lora(**settings):
    targets = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**targets, **settings})


def trained(model, name="lora_B"):
    """As after some training, and not as an adapter that does nothing yet."""
    for at, weight in model.named_parameters():
        if name in at:
            weight.data.normal_(0, 0.3)
    return model


@torch.no_grad()
def scaled(model):
    for weight in model.parameters():
        weight.mul_(1.1)
    return model


def from_config(model):
    return AutoModelForCausalLM.from_config(model.config)


def merged(model):
    return trained(get_peft_model(model, lora())).merge_and_unload().requires_grad_(True)


def resized(model):
    model.resize_token_embeddings(model.vocab_size + 8)
    return model


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.3)
    return model


def other_end(model):
    model.generation_config.eos_token_id = [1, 7]
    return model


def in_use(model):
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model.train()


def second(model):
    model = get_peft_model(model, lora())
    model.add_adapter("second", lora())
    model.set_adapter("second")
    return trained(model, "lora_B.second")


def saved_adapter(model, folder, **settings):
    trained(get_peft_model(model, lora())).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(model.name_or_path)
    return PeftModel.from_pretrained(base, folder, **settings)


BASES = (lambda model: model, scaled, from_config, merged, resized, untied, other_end, in_use)
ADAPTERS = (
    lambda model: model,
    lambda model: get_peft_model(model, lora()),
    lambda model: trained(
        get_peft_model(model, lora(use_rslora=True, target_modules="all-linear"))
    ),
    second,
)


def names(model):
    """Names of the trainable weights."""
    found = (name for name, weight in model.named_parameters() if weight.requires_grad)
    return sorted(name.replace(".second.", ".default.") for name in found)


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize(
    ("base", "adapter"),
    itertools.product(BASES, ADAPTERS),
    ids=lambda way: getattr(way, "__name__", str(way)),
)
def test_what_is_trained_is_the_object(base, adapter, trainer, tiny_model, tmp_path):
    given = adapter(base(AutoModelForCausalLM.from_pretrained(tiny_model)))
    want, trainable = logits(given), names(given)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    made = trainer(given, tokenizer).module
    torch.testing.assert_close(logits(made.model), want)
    assert names(made.model) == trainable
    inner = getattr(made.model, "get_base_model", lambda: made.model)()
    assert inner.generation_config.eos_token_id == given.generation_config.eos_token_id
    as_named = base in (BASES[0], in_use)
    assert (made.hparams.model == tiny_model) == (as_named and adapter is ADAPTERS[0])
    assert (tmp_path / "run/initial_model/base").exists() == (
        not as_named and adapter is not ADAPTERS[0]
    )


def test_a_saved_adapter_and_a_new_one_are_trained_as_they_are(trainer, tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    given = saved_adapter(model, tmp_path / "sft", is_trainable=True)
    want = logits(given)
    torch.testing.assert_close(logits(trainer(given).module.model), want)
    frozen = AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)
    made = trainer(scaled(frozen), peft_config=lora()).module  # freezes the base in any case
    assert names(made.model) == names(get_peft_model(frozen, lora()))
    torch.testing.assert_close(logits(made.model), logits(frozen))


def norms(model):
    model = get_peft_model(model, lora())
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or "norm" in name)
    return model


def frozen(model):
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def doubled(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    return model


def without_gradient(model):
    model.lm_head.weight.register_hook(torch.zeros_like)
    return model


def subclass(model):
    class Mine(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    model.__class__ = Mine
    return model


def other_positions(model):
    model.model.rotary_emb.inv_freq.mul_(1.3)
    return model


def quantised(model):
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def both(model):
    model = get_peft_model(model, lora())
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    return model


def merged_in(model):
    model = trained(get_peft_model(model, lora()))
    model.merge_adapter()
    return model


def disabled(model):
    model = trained(get_peft_model(model, lora()))
    model.base_model.disable_adapter_layers()
    return model


def other_scale(model):
    model = get_peft_model(model, lora())  # which does nothing yet, with any scale
    for layer in model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling["default"] *= 3
    return model


def with_its_own(model):
    model.add_adapter(lora())  # as `AutoModelForCausalLM` loads an adapter's folder
    return model


def peft_of(**settings):
    return lambda model: get_peft_model(model, lora(**settings))


REFUSED = {
    "norms": (norms, "norm.weight` is trainable, and only the adapter `default`"),
    "frozen": (frozen, r"embed_tokens.weight` is frozen.*requires_grad_\(True\)"),
    "a hook": (doubled, "its logits differ by"),
    "a hook under an adapter": (lambda m: get_peft_model(doubled(m), lora()), "its logits differ"),
    "a hook of a gradient": (without_gradient, "a hook that changes its gradient"),
    "a subclass": (subclass, "its logits differ by"),
    "a buffer": (other_positions, "`model.rotary_emb.inv_freq` has other values"),
    "quantised": (quantised, "quantised"),
    "no weights": (lambda model: model.to("meta"), "on the device `meta`"),
    "a module": (lambda model: torch.nn.Linear(2, 2), "it is a `Linear`: give a model of tran"),
    "transformers' adapter": (with_its_own, "AutoPeftModelForCausalLM.*is_trainable=True"),
    "two adapters": (both, "2 active adapters.*Merge it"),
    "a merged adapter": (merged_in, "its adapter is merged"),
    "no adapter": (disabled, "is frozen"),
    "another scale": (other_scale, "another scale"),
    "DoRA": (peft_of(use_dora=True), "use_dora=True"),
    "a saved module": (peft_of(modules_to_save=["lm_head"]), "modules_to_save.default.weight` is"),
    "a trained bias": (peft_of(bias="lora_only"), "bias='lora_only'"),
    "a residual base": (peft_of(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
    "IA3": (
        lambda model: get_peft_model(
            model, IA3Config(target_modules=["q_proj"], feedforward_modules=[])
        ),
        "ia3_l.default` is trainable",
    ),
    "a prompt": (
        lambda model: get_peft_model(
            model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        ),
        "prompt_encoder",
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_another_than_the_object_is_refused(way, trainer, tiny_model, tmp_path):
    change, said = REFUSED[way]
    given = change(AutoModelForCausalLM.from_pretrained(tiny_model))
    with pytest.raises(UsageError, match=said):
        trainer(given, AutoTokenizer.from_pretrained(tiny_model))


def test_an_adapter_in_use_is_refused(trainer, tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(UsageError, match="is frozen: load the adapter with `is_trainable=True`"):
        trainer(saved_adapter(model, tmp_path / "sft"))
    with pytest.raises(UsageError, match="it has an adapter already, and `peft_config`"):
        trainer(get_peft_model(model, lora()), peft_config=lora())


def test_several_processes_load_an_object_by_its_name_alone(trainer, tiny_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert trainer(model, AutoTokenizer.from_pretrained(tiny_model)).module.hparams.model
    with pytest.raises(UsageError, match=r"several processes load it by its name, and .*folder"):
        trainer(scaled(model))
    with pytest.raises(UsageError, match="it has an adapter"):
        trainer(get_peft_model(model, lora()))


def test_a_tokenizer_is_the_object_too(trainer, tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert trainer(tiny_model, tokenizer).datamodule.run.settings.tokenizer == tiny_model
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    made = trainer(tiny_model, tokenizer)
    assert made.datamodule.run.settings.tokenizer == str(tmp_path / "run/initial_tokenizer")
    assert made.processing_class.chat_template == tokenizer.chat_template
    assert made.processing_class("1<tool>2")["input_ids"] == tokenizer("1<tool>2")["input_ids"]

    class Mine(type(tokenizer)):
        def __call__(self, text, **kwargs):
            return super().__call__(text.replace("1", "2"), **kwargs)

    tokenizer.__class__ = Mine
    with pytest.raises(UsageError, match=r"`processing_class`: .* its tokens are others"):
        trainer(tiny_model, tokenizer)


def test_a_later_run_in_the_folder_begins_with_its_own_object(trainer, tiny_model, tmp_path):
    """The folder held an adapter with its base, and then holds a model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    trainer(get_peft_model(scaled(model), lora()))
    config = json.loads(Path(tmp_path, "run/initial_model/adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).is_absolute()
    model = scaled(AutoModelForCausalLM.from_pretrained(tiny_model))
    want = logits(model)
    torch.testing.assert_close(logits(trainer(model).module.model), want)
