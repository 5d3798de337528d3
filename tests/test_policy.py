"""Loading the policy: what it needs beside the checkpoint."""

import pytest
import torch
from causal_families import FAMILIES, NOT_TINY, TEXT_MODELS, make_config, sharpen
from transformers import AutoModelForCausalLM, PreTrainedConfig, modeling_utils
from transformers.integrations import accelerate
from vllm_contract import requirement

from lit_rlsched.policy import load_policy


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning calls `configure_model`: inside `torch.device("cuda:0")`."""
    name = "get_torch_context_manager_or_global_device"
    monkeypatch.setattr(modeling_utils, name, lambda: torch.device("cpu"))


def test_loading_onto_a_gpu_needs_accelerate(monkeypatch, tiny_model):
    on_a_gpu(monkeypatch)
    assert load_policy(tiny_model).device.type == "cpu"
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda: False)
    with pytest.raises(ImportError, match="needs accelerate to load a model onto a GPU: pip inst"):
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
    config = make_config(family)
    raise_rates(config)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    sharpen(made)
    made.save_pretrained(folder)
    policy, ids = load_policy(str(folder)), torch.arange(3, 15)[None]
    with torch.no_grad():
        evaluated = policy.eval()(input_ids=ids, use_cache=False).logits
        policy.train()
        for _ in range(3):  # a layer may be skipped at random
            logits = policy(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(logits, evaluated, rtol=0, atol=1e-6)


NO_DROPOUT = ("diffllama",)
"""Refuses to compute with it."""
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
