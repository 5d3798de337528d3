import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_rlsched.engines.sampling import counter_uniform, draw


def noise(count: int, seed: int = 5) -> Tensor:
    return counter_uniform(torch.tensor(seed), torch.arange(count))


def take(logits: Tensor, noise: Tensor, **rules: float) -> tuple[Tensor, Tensor]:
    """Draw from the same logits at every value of the noise."""
    rules = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **rules}
    columns = {name: torch.full_like(noise, value) for name, value in rules.items()}
    return draw(logits.expand(len(noise), -1), noise, **columns)


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    warpers = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits[None])[0]


def test_the_noise_is_splitmix64() -> None:
    # first outputs of the reference implementation, seeded with 0
    assert noise(1, 0).item() == (splitmix64(splitmix64(0)) >> 11) / 2**53
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    wide = [0, 1, 2**62, 2**63 - 1, -1, -(2**63)]
    expected = [(splitmix64((splitmix64(s % 2**64) + 7) % 2**64) >> 11) / 2**53 for s in wide]
    assert counter_uniform(torch.tensor(wide), torch.tensor(7)).tolist() == expected


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_the_noise_is_uniform_within_and_across_streams() -> None:
    count = 20_000
    across = counter_uniform(torch.arange(count), torch.tensor(3))
    for u in (noise(count), across):
        assert u.min() >= 0 and u.max() < 1
        assert u.mean().item() == pytest.approx(0.5, abs=3 / math.sqrt(12 * count))
        assert torch.histc(u, 20, 0, 1).sub(count / 20).abs().max() < 4 * math.sqrt(count / 20)
        assert abs(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1]) < 3 / math.sqrt(count)


@pytest.mark.parametrize(
    "rules",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_come_as_often_as_they_should(rules: dict[str, float], dtype: torch.dtype) -> None:
    count = 20_000
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=dtype) * 2
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **rules}
    expected = warped(logits, **full).log_softmax(-1)
    tokens, logprobs = take(logits, noise(count), **rules)
    torch.testing.assert_close(logprobs, expected[tokens])
    p = expected.exp().double()
    deviation = torch.bincount(tokens, minlength=30) / count - p
    assert (deviation.abs() <= 4 * (p * (1 - p) / count).sqrt()).all()


@pytest.mark.parametrize("top_k", [0, 1, 3, 7, 8, 50])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.3, 1.0])
def test_what_is_dropped_is_what_transformers_drops(top_k: int, top_p: float, min_p: float) -> None:
    # probabilities 1/2, 1/4, 1/8 ... that hit the thresholds exactly, and a tie
    probs = torch.tensor(
        [0.125, 0.5, 0.03125, 0.25, 0.0625, 0.015625, 0.015625], dtype=torch.float64
    )
    for logits in (probs.log(), torch.linspace(-4, 3, 8, dtype=torch.float64) ** 3 / 9):
        kept = warped(logits, 1.0, top_k, top_p, min_p).isfinite()
        tokens, logprobs = take(
            logits,
            torch.linspace(0, 1 - 2**-53, 5000).double(),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        # the log-probability of any kept token tells how much was kept
        mass = (logits.log_softmax(-1)[tokens] - logprobs).exp()
        expected = logits.softmax(-1)[kept].sum().expand(5000)
        torch.testing.assert_close(mass, expected, rtol=1e-12, atol=0)
        assert kept[tokens].all()


def test_a_row_does_not_feel_its_neighbours() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 3
    rules = {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 1.0, 1.3, 1.0], dtype=torch.float64),
        "top_k": torch.tensor([0, 5, 5, 0, 0, 0], dtype=torch.float64),
        "top_p": torch.tensor([1.0, 0.5, 1.0, 0.9, 1.0, 1.0], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64),
    }
    u = noise(6)
    tokens, logprobs = draw(logits, u, **rules)
    for i in range(6):
        alone = draw(logits[i : i + 1], u[i : i + 1], **{k: v[i : i + 1] for k, v in rules.items()})
        assert (tokens[i], logprobs[i]) == (alone[0][0], alone[1][0])
    assert tokens[1] == logits[1].argmax()
    assert logprobs[1] == logits[1].log_softmax(-1).max()


def test_the_ends_of_the_noise_draw_tokens_of_some_probability() -> None:
    logits = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf])
    tokens, logprobs = take(logits, torch.tensor([0.0, 1 - 2**-53]).double())
    assert tokens.tolist() == [1, 2]
    assert logprobs.isfinite().all()
