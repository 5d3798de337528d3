"""The tests' model with random adapters."""

import pytest
import torch

from lit_rlsched.training.policy import load_policy

peft = pytest.importorskip("peft")


def with_lora(
    model: str, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: object
) -> torch.nn.Module:
    """The model with random adapters, on which peft's `LoraConfig` has these settings."""
    config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = peft.get_peft_model(
            load_policy(model, dtype), peft.LoraConfig(task_type="CAUSAL_LM", **config)
        )
        change(policy)
    return policy.eval()


def change(policy: torch.nn.Module, size: float = 0.05) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += size * torch.randn_like(parameter)
