"""Micro-batches for tests of the losses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlsched.training.losses import (
    LossOutput,
    policy_loss,
)

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"]


every_loss = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def extra(loss_type: str) -> dict[str, Any]:
    needs = {"dr_grpo": {"max_completion_length": 4}, "cispo": {"epsilon_high": 1.1}}
    return {"loss_type": loss_type, **needs.get(loss_type, {})}


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_batch(sequences: int = 6, width: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp = -noise(sequences, width).abs()
    lengths = torch.randint(0, width + 1, (sequences, 1), generator=generator)
    return {
        "logp": logp,
        "advantages": noise(sequences),
        "mask": torch.arange(width) < lengths,
        "old_logp": logp + 0.3 * noise(sequences, width),
        "ref_logp": logp + 0.3 * noise(sequences, width),
        "rollout_logp": logp + 0.3 * noise(sequences, width),
    }


def gradient(batch: dict[str, Tensor], **settings: Any) -> tuple[LossOutput, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    output = policy_loss(**{**batch, "logp": logp}, **settings)
    return output, torch.autograd.grad(output.loss, logp)[0]
