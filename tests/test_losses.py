"""Losses, gradients and metrics by hand, and however a step is cut into micro-batches."""

from itertools import pairwise
from math import exp, log
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import LOSS_TYPES, every_loss, extra, gradient, random_batch, tensor
from torch import Tensor

from lit_rlsched.training.losses import (
    LossOutput,
    check_loss_settings,
    divides_by,
    policy_loss,
    rollout_correction,
)

RATIO = "sampling/importance_sampling_ratio"


# On-policy, every ratio is 1 and the gradient is -advantage times the token's weight.
WEIGHTS = {
    "grpo": [[1 / 4, 1 / 4], [1 / 2, 0]],
    "gspo": [[1 / 4, 1 / 4], [1 / 2, 0]],
    "bnpo": [[1 / 3, 1 / 3], [1 / 3, 0]],
    "dapo": [[1 / 3, 1 / 3], [1 / 3, 0]],
    "cispo": [[1 / 3, 1 / 3], [1 / 3, 0]],
    "dr_grpo": [[1 / 8, 1 / 8], [1 / 8, 0]],
    "rloo": [[1 / 2, 1 / 2], [1 / 2, 0]],
}


@every_loss
def test_on_policy_gradient(loss_type: str) -> None:
    batch = {
        "logp": tensor([-1.0, -2.0], [-3.0, 9.0]),
        "advantages": torch.tensor([1.0, -3.0], dtype=torch.float64),
        "mask": tensor([1, 1], [1, 0]),
    }
    _, grad = gradient(batch, **extra(loss_type))
    expected = -batch["advantages"].unsqueeze(1) * tensor(*WEIGHTS[loss_type])
    torch.testing.assert_close(grad, expected)


def one_token(ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """Loss of a single token and its derivative with respect to the log-probability."""
    batch = {
        "logp": tensor([log(ratio) - 1.0]),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "mask": tensor([1]),
        "old_logp": tensor([-1.0]),
    }
    output, grad = gradient(batch, **settings)
    return output.loss.item(), grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "slope"),
    [
        (1.1, 2.0, {}, -2.2, -2.2),
        (1.3, 2.0, {}, -2.4, 0.0),
        (1.3, 2.0, {"epsilon_high": 0.5}, -2.6, -2.6),
        (0.5, 2.0, {}, -1.0, -1.0),
        (0.5, -2.0, {}, 1.6, 0.0),
        (0.5, -2.0, {"epsilon": 0.6}, 1.0, 1.0),
        (9.0, -2.0, {}, 18.0, 18.0),
        (9.0, -2.0, {"delta": 4.0}, 8.0, 0.0),
        (9.0, 2.0, {"delta": 4.0}, -2.4, 0.0),
        (9.0, 2.0, {"loss_type": "cispo", "epsilon_high": 5.0}, -10 * (log(9) - 1), -10.0),
        (0.5, 2.0, {"loss_type": "cispo", "epsilon_high": 5.0}, -(log(0.5) - 1), -1.0),
    ],
)
def test_clipping_by_hand(
    ratio: float, advantage: float, settings: dict[str, Any], loss: float, slope: float
) -> None:
    assert one_token(ratio, advantage, **settings) == pytest.approx((loss, slope))


def test_sequence_ratios_by_hand() -> None:
    batch = {
        "logp": tensor([-1.0, -1.0, 5.0]),
        "old_logp": tensor([-1.1, -1.05, 0.0]),
        "advantages": torch.tensor([-1.0], dtype=torch.float64),
        "mask": tensor([1, 1, 0]),
    }
    assert policy_loss(**batch, loss_type="gspo").loss.item() == pytest.approx(exp(0.075))
    assert policy_loss(**batch, loss_type="rloo").loss.item() == pytest.approx(exp(0.15))


def off_policy(ratios: Tensor, advantages: list[float], **settings: Any) -> LossOutput:
    """The loss of tokens with these ratios; NaN is padding."""
    mask = ~ratios.isnan()
    logp = torch.full_like(ratios, -1.0)
    given = torch.tensor(advantages, dtype=torch.float64)
    return policy_loss(logp, given, mask, old_logp=logp - ratios.log(), **settings)


NAN = float("nan")


def test_clip_metrics_by_hand() -> None:
    ratios = tensor([1.5, 1.0, 0.5], [0.5, 1.5, NAN], [0.5, 1.5, NAN], [NAN, NAN, NAN])
    metrics = off_policy(ratios, [1.0, -1.0, 0.0, 9.0]).metrics
    expected = {"low_mean": 1 / 7, "low_min": 0.0, "high_mean": 1 / 7, "high_max": 1 / 3}
    for name, value in {**expected, "region_mean": 2 / 7}.items():
        assert metrics[f"clip_ratio/{name}"].item() == pytest.approx(value), name
    metrics = off_policy(tensor([0.5, 1.0, 1.0], [0.5, 0.7, 0.9]), [-1.0, -2.0]).metrics
    assert metrics["clip_ratio/low_min"].item() == pytest.approx(1 / 3)
    wide = off_policy(tensor([1.25, 0.7, 1.35]), [1.0], epsilon=0.4, epsilon_high=0.3).metrics
    assert wide["clip_ratio/high_mean"].item() == pytest.approx(1 / 3)
    sequence = off_policy(tensor([1.5, 1.5], [1.0, NAN]), [1.0, 1.0], loss_type="gspo").metrics
    assert sequence["clip_ratio/high_mean"].item() == pytest.approx(2 / 3)  # once per token
    assert sequence["policy_loss"].item() == pytest.approx(-(1.2 * 2 + 1) / 3)


def test_a_sequence_of_one_token_has_clip_ratios() -> None:
    high = off_policy(tensor([1.5, NAN], [1.0, 1.0]), [1.0, 1.0]).metrics
    assert high["clip_ratio/high_max"].item() == 1
    low = off_policy(tensor([1.0, NAN], [0.5, 0.5]), [-1.0, -1.0]).metrics
    assert low["clip_ratio/low_min"].item() == 0


def test_a_ratio_at_its_bound_is_not_clipped() -> None:
    on_policy = off_policy(tensor([1.0], [1.0]), [1.0, -1.0], epsilon=0.0).metrics
    assert on_policy["clip_ratio/region_mean"].item() == 0
    on_policy = off_policy(tensor([1.0]), [1.0], loss_type="cispo", epsilon_high=1.0).metrics
    assert on_policy["cispo_clip_ratio"].item() == 0
    weight, metrics = rollout_correction(
        tensor([-1.0]), tensor([-1.0]), tensor([1]).bool(), "sequence_mask", 1.0
    )
    assert weight.item() == 1 and metrics[f"{RATIO}/clipped_fraction"].item() == 0


def test_cispo_counts_what_it_caps() -> None:
    ratios = tensor([3.0, 1.0, 3.0, NAN], [3.0, NAN, NAN, NAN], [3.0, NAN, NAN, NAN])
    metrics = off_policy(ratios, [1.0, -1.0, 0.0], loss_type="cispo", epsilon_high=2.0).metrics
    assert metrics["cispo_clip_ratio"].item() == pytest.approx(2 / 5)


@pytest.mark.parametrize(("ratio", "weight"), [(2.9, 2.9), (3.1, 0.0)])
def test_by_default_a_sequence_that_the_engine_drew_from_elsewhere_is_masked(
    ratio: float, weight: float
) -> None:
    logp = tensor([-1.0, -1.0])
    rollout = logp - log(ratio) / 2
    output = policy_loss(logp, torch.ones(1).double(), torch.ones(1, 2), rollout_logp=rollout)
    assert output.loss.item() == pytest.approx(-weight)
    assert {"clip_ratio/region_mean", f"{RATIO}/mean"} <= output.metrics.keys()


def test_what_a_loss_is_divided_by() -> None:
    for loss_type in LOSS_TYPES:
        settings = extra(loss_type)
        batch = {name: value[:, None] for name, value in [("logp", -torch.ones(3).double())]}
        batch |= {"advantages": torch.ones(3).double(), "mask": torch.ones(3, 1)}
        plain = policy_loss(**batch, **settings, step_sequences=3, step_tokens=3).loss
        sequences = policy_loss(**batch, **settings, step_sequences=6, step_tokens=3).loss
        tokens = policy_loss(**batch, **settings, step_sequences=3, step_tokens=6).loss
        halved = {"sequences": sequences, "tokens": tokens}
        by = divides_by(loss_type)  # type: ignore[arg-type]
        torch.testing.assert_close(halved.pop(by), plain / 2)
        torch.testing.assert_close(*halved.values(), plain)


def test_fewer_than_one_token_counts_as_one() -> None:
    batch = {"logp": tensor([-1.0]), "advantages": tensor(2.0), "mask": tensor([1])}
    for tokens, loss in ((0, -2.0), (0.5, -2.0), (1, -2.0), (1.5, -2 / 1.5)):
        assert policy_loss(**batch, step_tokens=tokens).loss.item() == pytest.approx(loss)


def test_kl_by_hand() -> None:
    batch = {
        "logp": tensor([-1.0]),
        "old_logp": tensor([-1.5]),
        "ref_logp": tensor([-0.7]),
        "advantages": torch.zeros(1, dtype=torch.float64),
        "mask": tensor([1]),
    }
    output, grad = gradient(batch, beta=0.1)
    k3, ratio = exp(0.3) - 0.3 - 1, exp(0.5)
    assert output.loss.item() == pytest.approx(0.1 * k3 * ratio)
    assert output.metrics["kl"].item() == pytest.approx(k3 * ratio)
    assert grad.item() == pytest.approx(0.1 * ratio * (k3 + 1 - exp(0.3)))


@pytest.mark.parametrize(
    ("mode", "weights", "clipped"),
    [
        ("token_truncate", [[1.0, 3.0, 1.0], [0.5, 1.0, 1.0]], 1 / 5),
        ("token_mask", [[1.0, 0.0, 1.0], [0.5, 1.0, 1.0]], 1 / 5),
        ("sequence_truncate", [[3.0], [0.5]], 3 / 5),
        ("sequence_mask", [[0.0], [0.5]], 3 / 5),
    ],
)
def test_rollout_correction_by_hand(mode: Any, weights: list[list[float]], clipped: float) -> None:
    old = tensor([-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0])
    rollout = tensor([-1.0, -1.0 - log(4), float("nan")], [-1.0 + log(2), -1.0, float("nan")])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    weight, metrics = rollout_correction(old, rollout, mask, mode, 3.0)
    torch.testing.assert_close(weight, tensor(*weights))
    # Raw: the ratio of 4 stays visible whatever the remedy.
    assert metrics[f"{RATIO}/min"].item() == pytest.approx(0.5)
    assert metrics[f"{RATIO}/max"].item() == pytest.approx(4.0)
    mean = (4 * 3 + 0.5 * 2) / 5 if mode.startswith("sequence") else (1 + 4 + 1 + 0.5 + 1) / 5
    assert metrics[f"{RATIO}/mean"].item() == pytest.approx(mean)
    assert metrics[f"{RATIO}/clipped_fraction"].item() == pytest.approx(clipped)
    difference = "sampling/sampling_logp_difference"
    assert metrics[f"{difference}/mean"].item() == pytest.approx((log(4) + log(2)) / 4)
    assert metrics[f"{difference}/max"].item() == pytest.approx(log(4))


@pytest.mark.parametrize(("mode", "ratio"), [("token_mask", 2.0), ("sequence_mask", 4.0)])
def test_ratios_of_padding_are_not_counted(mode: Any, ratio: float) -> None:
    old, mask = tensor([-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]), tensor([1, 1, 0], [0, 0, 0]).bool()
    _, metrics = rollout_correction(old, old - log(2), mask, mode, 9.0)
    for name in ("min", "mean", "max"):
        assert metrics[f"{RATIO}/{name}"].item() == pytest.approx(ratio), name


@every_loss
@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_rollout_correction_weighs_the_sequence(loss_type: str, mode: str) -> None:
    batch = random_batch()
    settings = {**extra(loss_type), "importance_sampling_mode": mode}
    settings["importance_sampling_clip_max"] = 1.1
    weight, _ = rollout_correction(
        batch["old_logp"],
        batch["rollout_logp"],
        batch["mask"],
        settings["importance_sampling_mode"],
        1.1,
    )
    _, grad = gradient(batch, **settings)
    _, plain = gradient({**batch, "rollout_logp": None}, **settings)
    torch.testing.assert_close(grad, plain * weight)
    _, switched_off = gradient(batch, **extra(loss_type), importance_sampling_mode=None)
    torch.testing.assert_close(switched_off, plain)


@every_loss
def test_padding_is_never_read(loss_type: str) -> None:
    batch = random_batch()
    settings = {**extra(loss_type), "beta": 0.0 if loss_type == "rloo" else 0.1}
    clean, clean_grad = gradient(batch, **settings)
    for name, junk in (
        ("logp", float("-inf")),
        ("old_logp", float("nan")),
        ("ref_logp", float("inf")),
        ("rollout_logp", float("nan")),
    ):
        batch[name] = batch[name].masked_fill(~batch["mask"], junk)
    dirty, dirty_grad = gradient(batch, **settings)
    torch.testing.assert_close(clean.loss, dirty.loss, rtol=0, atol=0)
    torch.testing.assert_close(clean_grad, dirty_grad, rtol=0, atol=0)
    torch.testing.assert_close(clean.metrics, dirty.metrics, rtol=0, atol=0)


@every_loss
@pytest.mark.parametrize("width", [0, 3])
def test_nothing_to_train_on(loss_type: str, width: int) -> None:
    batch = random_batch(width=width)
    batch["mask"] = torch.zeros_like(batch["mask"])
    settings = {**extra(loss_type), "beta": 0.0 if loss_type == "rloo" else 0.1}
    output, grad = gradient(batch, **settings, step_tokens=0)
    assert output.loss.isfinite()
    assert (grad == 0).all()
    for name, value in output.metrics.items():
        neutral = {"min": torch.inf, "max": -torch.inf}.get(name.rpartition("/")[2][-3:], 0.0)
        assert value.item() == neutral, name


@st.composite
def cuts(draw: st.DrawFn, size: int = 6) -> list[int]:
    inner = draw(st.sets(st.integers(1, size - 1)))
    return [0, *sorted(inner), size]


@every_loss
@given(bounds=cuts(), seed=st.integers(0, 50))
def test_any_cut_into_micro_batches_is_the_same_step(
    loss_type: str, bounds: list[int], seed: int
) -> None:
    batch = random_batch(seed=seed)
    settings = {**extra(loss_type), "beta": 0.0 if loss_type == "rloo" else 0.1}
    settings |= {"step_sequences": 6, "step_tokens": float(batch["mask"].sum())}
    whole, whole_grad = gradient(batch, **settings)
    parts = []
    for start, stop in pairwise(bounds):
        part = {name: value[start:stop] for name, value in batch.items()}
        parts.append((*gradient(part, **settings), float(part["mask"].sum())))
    torch.testing.assert_close(sum(o.loss for o, _, _ in parts), whole.loss)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in parts]), whole_grad)
    for name, value in whole.metrics.items():
        values = [o.metrics[name] for o, _, _ in parts]
        if name.endswith(("min", "max")):
            combined = (min if name.endswith("min") else max)(values)
        else:
            tokens = sum(weight for *_, weight in parts) or 1.0
            combined = sum(v * w for v, (*_, w) in zip(values, parts, strict=True)) / tokens
        torch.testing.assert_close(torch.as_tensor(combined, dtype=value.dtype), value, msg=name)


@every_loss
def test_inputs_are_untouched_and_metrics_detached(loss_type: str) -> None:
    batch = random_batch()
    before = {name: value.clone() for name, value in batch.items()}
    output, _ = gradient(batch, **extra(loss_type))
    torch.testing.assert_close(batch, before, rtol=0, atol=0)
    assert output.loss.dim() == 0
    assert all(v.dim() == 0 and not v.requires_grad for v in output.metrics.values())


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
