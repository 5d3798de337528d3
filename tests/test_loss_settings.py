"""Which settings of a loss are refused."""

from typing import Any

import pytest
import torch
from loss_batches import every_loss, extra

from lit_rlsched.settings import UsageError
from lit_rlsched.training.losses import (
    check_loss_settings,
    policy_loss,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ppo"}, "`loss_type='ppo'` is unknown. Use one of"),
        ({"importance_sampling_mode": "token"}, "`importance_sampling_mode='token'` is unknown"),
        ({"importance_sampling_clip_max": 0.0}, "`importance_sampling_mode=None` to switch"),
        ({"epsilon": -0.1}, "must not be negative"),
        ({"epsilon_high": -0.1}, "must not be negative"),
        ({"beta": -0.1}, "must not be negative"),
        ({"delta": 1.2}, "`delta=1.2` must exceed"),
        ({"delta": 1.25, "epsilon_high": 0.28}, "`delta=1.25` must exceed"),
        ({"delta": 4.0, "loss_type": "rloo"}, "has no effect on `loss_type='rloo'`"),
        ({"loss_type": "cispo"}, "Set it, for example to 5.0"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "Set it, for example to 5.0"),
        ({"loss_type": "rloo", "beta": 0.1}, "Use `RLOOModule`"),
        ({"loss_type": "rloo", "importance_sampling_mode": "token_mask"}, "Use 'sequence_mask'"),
        ({"loss_type": "rloo", "importance_sampling_mode": "token_truncate"}, "'sequence_mask'"),
        ({"delta": 4.0, "loss_type": "cispo", "epsilon_high": 2.0}, "`loss_type='cispo'`. Remove"),
        ({"epsilon": -0.1, "epsilon_high": 0.2, "beta": 0.1}, "must not be negative"),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    settings = {"loss_type": "dapo", **settings}
    with pytest.raises(UsageError, match=message):
        check_loss_settings(**settings)
    with pytest.raises(UsageError, match=message):
        policy_loss(torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.1}, "needs `ref_logp`"),
        ({"loss_type": "dr_grpo"}, "divides by `max_completion_length`"),
    ],
)
def test_missing_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        policy_loss(torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.0, "epsilon_high": 0.0, "beta": 0.0},
        {"loss_type": "cispo", "epsilon_high": 1.0},
        {"delta": 1.21},
        {"delta": 1.6, "epsilon_high": 0.5},
        {"importance_sampling_clip_max": 0.01},
        {"loss_type": "gspo", "delta": 2.0},
        {"loss_type": "rloo", "importance_sampling_mode": "sequence_truncate"},
        {"loss_type": "rloo", "importance_sampling_mode": None},
        {"importance_sampling_mode": "token_mask"},
    ],
)
def test_settings_at_their_bounds(settings: dict[str, Any]) -> None:
    check_loss_settings(**{"loss_type": "dapo", **settings})


@every_loss
def test_accepted_settings(loss_type: str) -> None:
    settings = extra(loss_type)
    settings.pop("max_completion_length", None)
    check_loss_settings(**settings)
