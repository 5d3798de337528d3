"""A model that is given as an object is the one that is trained, or it is refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
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


BASES = (lambda model: model, scaled, from_config, merged, resized, untied, other_end, in_use)


def names(model):
    """Names of the trainable weights."""
    return sorted(name for name, weight in model.named_parameters() if weight.requires_grad)


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize("base", BASES, ids=lambda way: way.__name__)
def test_what_is_trained_is_the_object(base, trainer, tiny_model, tmp_path):
    given = base(AutoModelForCausalLM.from_pretrained(tiny_model))
    want, trainable = logits(given), names(given)
    made = trainer(given, AutoTokenizer.from_pretrained(tiny_model)).module
    torch.testing.assert_close(logits(made.model), want)
    assert names(made.model) == trainable
    assert made.model.generation_config.eos_token_id == given.generation_config.eos_token_id
    as_named = base in (BASES[0], in_use)
    assert (made.hparams.model == tiny_model) == as_named
    assert (tmp_path / "run/initial_model").exists() != as_named


def test_a_new_adapter_is_added_to_a_changed_base(trainer, tiny_model):
    frozen = AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)
    made = trainer(scaled(frozen), peft_config=lora()).module  # freezes the base in any case
    assert names(made.model) == names(get_peft_model(frozen, lora()))
    torch.testing.assert_close(logits(made.model), logits(frozen))


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


def with_its_own(model):
    model.add_adapter(lora())  # as `AutoModelForCausalLM` loads an adapter's folder
    return model


REFUSED = {
    "frozen": (frozen, r"embed_tokens.weight` is frozen.*requires_grad_\(True\)"),
    "a hook": (doubled, "its logits differ by"),
    "a hook of a gradient": (without_gradient, "a hook that changes its gradient"),
    "a subclass": (subclass, "its logits differ by"),
    "a buffer": (other_positions, "`model.rotary_emb.inv_freq` has other values"),
    "quantised": (quantised, "quantised"),
    "no weights": (lambda model: model.to("meta"), "on the device `meta`"),
    "a module": (lambda model: torch.nn.Linear(2, 2), "it is a `Linear`: give a model of tran"),
    "transformers' adapter": (with_its_own, "Give the adapter's folder"),
    "an adapter": (lambda model: get_peft_model(model, lora()), "Give the adapter's folder"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_another_than_the_object_is_refused(way, trainer, tiny_model, tmp_path):
    change, said = REFUSED[way]
    given = change(AutoModelForCausalLM.from_pretrained(tiny_model))
    with pytest.raises(UsageError, match=said):
        trainer(given, AutoTokenizer.from_pretrained(tiny_model))


def test_several_processes_load_an_object_by_its_name_alone(trainer, tiny_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert trainer(model, AutoTokenizer.from_pretrained(tiny_model)).module.hparams.model
    with pytest.raises(UsageError, match=r"several processes load it by its name, and .*folder"):
        trainer(scaled(model))


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


def test_a_later_run_in_the_folder_begins_with_its_own_object(trainer, tiny_model):
    trainer(scaled(AutoModelForCausalLM.from_pretrained(tiny_model)))
    model = from_config(AutoModelForCausalLM.from_pretrained(tiny_model))
    want = logits(model)
    torch.testing.assert_close(logits(trainer(model).module.model), want)
