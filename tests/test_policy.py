"""Loading the policy: what it needs beside the checkpoint."""

import pytest
import torch
from transformers import modeling_utils
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
