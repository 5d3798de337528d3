"""Which settings of a loss are refused."""

from typing import Any

import pytest
from loss_batches import every_loss, extra

from lit_rlsched.training.losses import (
    check_loss_settings,
)


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
