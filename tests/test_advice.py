"""What a run is told once, with what to do about it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import MicroGroupSampling
from lit_rlsched.run.advice import (
    EQUAL_ROUNDS,
    MOSTLY_EQUAL_ROUNDS,
    Advice,
    restored_settings,
)
from lit_rlsched.run.record import RunRecord
from lit_rlsched.training.round_metrics import reward_metrics

NAN = float("nan")


def told(recorded: list[warnings.WarningMessage], text: str) -> list[str]:
    return [str(w.message) for w in recorded if text in str(w.message)]


def of_round(reasons: list[str], share: float = 0.0, rounds: int = 0) -> list[str]:
    record: Any = RunRecord()
    record.rounds = [{"frac_reward_zero_std": share, "reward": 0.5}] * rounds
    round: Any = SimpleNamespace(completions=[SimpleNamespace(finish_reason=r) for r in reasons])
    return Advice().of_round(round, record, limit=8, in_groups=True)


def test_all_cut() -> None:
    assert of_round([]) == of_round(["length", "stop"]) == []
    (text,) = of_round(["length"] * 3)
    assert "All 3 completions" in text and "`max_completion_length=8`" in text


def test_no_eos() -> None:
    assert Advice().at_start([2], None, 8) == []
    (text,) = Advice().at_start([], None, 8)
    assert "`eos_token`" in text


def test_idle_slots() -> None:
    assert Advice().at_start([2], 8, 8) == []
    (text,) = Advice().at_start([2], 64, 8)
    assert "so 56 slots stay empty. Use `slots=8`" in text


@pytest.mark.parametrize(
    ("rewards", "same"),
    [
        ([[1.0, 1.0], [0.0, 0.0]], [True, True]),
        ([[1.0, 1.0], [0.0, 0.5]], [True, False]),
        ([[1.0, NAN], [NAN, NAN]], [True, True]),
        ([[1.0, NAN, 0.0]], [False]),
        ([[1e8, 1e8 + 1]], [False]),
    ],
)
def test_equal(rewards: list[list[float]], same: list[bool]) -> None:
    found = reward_metrics([], [], torch.tensor(rewards, dtype=torch.float64))
    assert found["frac_reward_zero_std"] == fmean(same)


def test_prompts_that_mostly_have_equal_rewards() -> None:
    assert of_round([], 0.9, MOSTLY_EQUAL_ROUNDS - 1) == []
    assert of_round([], 0.79, MOSTLY_EQUAL_ROUNDS) == []
    (text,) = of_round([], 0.9, MOSTLY_EQUAL_ROUNDS)
    assert "of 90 % of the prompts" in text


def test_each_is_said_once_also_after_a_resume() -> None:
    advice = Advice()
    assert len(advice.at_start([], 64, 8)) == 2 and advice.at_start([], 64, 8) == []
    resumed = Advice()
    assert len(resumed.at_start([], None, 8)) == 1
    resumed.load_state_dict(advice.state_dict())
    assert resumed.at_start([], 64, 8) == []


def test_weights_in_half_precision_are_advised_about_where_they_are_trained() -> None:
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    (text,) = Advice().at_start([2], None, 8, half)
    assert "`precision: bf16-mixed`" in text
    assert not Advice().at_start([2], None, 8, half.float()) and not Advice().at_start([2], None, 8)


def test_restored_settings() -> None:
    group = {"lr": 5e-6, "initial_lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.0}
    same = {"learning_rate": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0}
    assert restored_settings(same, [group]) is None
    assert restored_settings({**same, "learning_rate": 1}, []) is None
    text = restored_settings({**same, "learning_rate": 1e-4, "weight_decay": 0.1}, [group])
    assert text and "`learning_rate=0.0001` (the checkpoint has 1e-05) and `weight_decay" in text


def test_a_run_whose_completions_are_all_cut_and_slots_idle_is_told_once(fit: Callable) -> None:
    slots = MicroGroupSampling(slots=64)
    with pytest.warns() as recorded:
        fit(callbacks=[slots], max_completion_length=2, trainer={"max_epochs": 3})
    assert len(told(recorded, "were cut at `max_completion_length=2`")) == 1
    assert len(told(recorded, "`MicroGroupSampling(slots=64)`: a round draws 16")) == 1


def test_a_run_that_is_fine_is_told_nothing(fit: Callable) -> None:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        fit(callbacks=[MicroGroupSampling(slots=16)], max_completion_length=60)
    for text in ("were cut", "a round draws", "same reward", "no effect"):
        assert not told(recorded, text)


def test_equal_rewards_are_counted_across_a_resume(fit: Callable, tmp_path: Path) -> None:
    def constant(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.25] * len(completions)

    path = None
    for rounds in (EQUAL_ROUNDS - 2, EQUAL_ROUNDS - 1, EQUAL_ROUNDS):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            limit = {"max_epochs": rounds}
            trainer, *_ = fit(reward_funcs=[constant], trainer=limit, ckpt_path=path)
            trainer.save_checkpoint(path := tmp_path / "a.ckpt")
        assert len(told(recorded, "same reward")) == (rounds == EQUAL_ROUNDS)
    (text,) = told(recorded, "same reward")
    assert f"In {EQUAL_ROUNDS} rounds in a row" in text and "0.25 on average" in text


def test_a_learning_rate_that_a_resume_does_not_take(
    fit: Callable, tmp_path: Path, tiny_model: str
) -> None:
    trainer, _, _ = fit(trainer={"max_epochs": 1})
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = {"trainer": {"max_epochs": 2}, "ckpt_path": tmp_path / "a.ckpt"}
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        fit(**again)
    assert not told(recorded, "no effect")
    with pytest.warns(UserWarning, match=r"`learning_rate=0.5` \(the checkpoint has 0.001\) will"):
        trainer, _, _ = fit(GRPOModule(tiny_model, learning_rate=0.5), **again)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)
