"""Loading the policy: what it needs beside the checkpoint."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from causal_families import FAMILIES, NOT_TINY, TEXT_MODELS, make_config, make_family, sharpen
from character_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedConfig, modeling_utils
from transformers.integrations import accelerate
from vllm_contract import requirement

from lit_rlsched import GRPOModule
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import context_length, load_policy


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning calls `configure_model`: inside `torch.device("cuda:0")`."""
    name = "get_torch_context_manager_or_global_device"
    monkeypatch.setattr(modeling_utils, name, lambda: torch.device("cpu"))


def test_loading_onto_a_gpu_needs_accelerate(monkeypatch, tiny_model):
    on_a_gpu(monkeypatch)
    assert load_policy(tiny_model).device.type == "cpu"
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda: False)
    with pytest.raises(UsageError, match="needs accelerate to load a model onto a GPU: pip inst"):
        load_policy(tiny_model)


def test_accelerate_comes_with_us():
    assert requirement("accelerate").specifier.contains("1.15.0")


def raise_rates(config):
    """Give every part of a model all the noise that it can have in train mode."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            raise_rates(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.3)


def check_train_mode(family, folder):
    """Rates are 0, checkpointing trains in train mode, and the model is the one of the folder."""
    config = make_config(family)
    raise_rates(config)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    sharpen(made)
    made.save_pretrained(folder)
    made, ids = AutoModelForCausalLM.from_pretrained(folder), torch.arange(3, 15)[None]
    loaded = load_policy(str(folder))
    policies = [loaded]
    if family not in SAMPLES_EXPERTS:
        policies.append(copy.deepcopy(loaded).train())
    if made.supports_gradient_checkpointing:
        module = GRPOModule(str(folder), gradient_checkpointing=True)
        module.configure_model()
        assert any(layer.training for layer in module.model.modules())
        policies.append(module.model)
    expected = made(input_ids=ids, use_cache=False).logits
    for policy in policies:
        for _ in range(3):  # a layer may be skipped at random
            logits = policy(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(
                logits, expected, rtol=0, atol=1e-4
            )  # kernels round otherwise


NO_DROPOUT = ("diffllama",)
"""Refuses to compute with it."""
SAMPLES_EXPERTS = ("phimoe",)
"""Its router samples in train mode, whatever the rates are; under checkpointing it is not in it."""
NOISY = ["bloom", "falcon", "gpt2", "gpt_neox", "llama", "mixtral", "mpt", "opt", "phimoe", "xglm"]


@pytest.mark.parametrize("family", NOISY)
def test_train_mode_is_without_noise(family, tmp_path):
    check_train_mode(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", sorted({*FAMILIES} - {*NOT_TINY, *TEXT_MODELS, *NO_DROPOUT, *NOISY})
)
def test_train_mode_is_without_noise_in_every_family(family, tmp_path):
    check_train_mode(family, tmp_path)


# What is loaded.

FILES = {
    "gguf": (["a.gguf"], "", r"a GGUF file.*transformers read `a.gguf`"),
    "a gguf file": (["a.gguf"], "a.gguf", "a GGUF file"),
    "checkpoint": (["last.ckpt"], "last.ckpt", "a file. Give a checkpoint folder.*lit-rlsched exp"),
    "nothing": ([], "", "has no config.json"),
}


@pytest.mark.parametrize(("files", "model", "said"), FILES.values(), ids=FILES)
def test_what_is_no_model_is_refused(files, model, said, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=said):
        load_policy(str(tmp_path / model))


@pytest.mark.parametrize(
    "quantized",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda quantized: quantized["quant_method"],
)
def test_quantised_weights_are_refused(quantized, tiny_model, tmp_path):
    config = json.loads(Path(tiny_model, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    with pytest.raises(UsageError, match="quantised.*" + quantized["quant_method"]):
        GRPOModule(str(tmp_path), lora_rank=4).configure_model()


# Settings that a family's config lacks.


def train(family, folder, fit, engine):
    model = make_family(family)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    module = GRPOModule(str(folder), learning_rate=1e-3)
    trainer, module, _ = fit(module, trainer={"max_epochs": 2}, engine=engine)
    assert trainer.callback_metrics["sync/max_logp_diff"] < 1e-3
    return module


def test_a_context_of_another_name(fit, tmp_path):
    assert context_length(train("mpt", tmp_path, fit, TransformersEngine()).model) == 2048


REFUSED = {
    "mamba": "a 'mamba' model has recurrent layers alone",
    "rwkv": "a 'rwkv' model has recurrent layers alone",
    "bloom": "cannot decode 'bloom': it counts its positions itself.*Use `VLLMEngine`",
    "bart": "cannot decode 'bart': it counts its positions itself",
    "recurrent_gemma": "without full attention",
}


@pytest.mark.parametrize(("family", "said"), REFUSED.items(), ids=REFUSED)
def test_a_model_that_the_engine_cannot_decode_is_refused(family, said, fit, tmp_path):
    with pytest.raises(UsageError, match=said):
        train(family, tmp_path, fit, TransformersEngine())


def test_without_a_maximum_every_length_fits():
    assert context_length(make_family("bloom")) == sys.maxsize
