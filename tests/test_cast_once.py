"""The LM head under autocast: the same numbers in fewer kernels and bytes."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.lm_head import SHAPES, count
from lit_rlsched.training import logprobs
from lit_rlsched.training.logprobs import CHUNK_BYTES, completion_logprobs, default_chunk
from lit_rlsched.training.precision import cast_once

VOCAB = 64
PROMPTS, COMPLETIONS = torch.tensor([2, 5]), torch.tensor([7, 4])
BUDGET = {"Qwen3-0.6B": (275, 284.0), "Qwen2.5-7B, LoRA": (246, 277.0)}
"""Kernels and GB of a pass over 16,384 positions on a GPU, as counted when this was written."""


@pytest.mark.parametrize("shape", SHAPES)
def test_the_head_takes_no_more_kernels_and_bytes(shape):
    kernels, moved = count(*SHAPES[shape], CHUNK_BYTES["cuda"])
    allowed, gigabytes = BUDGET[shape]
    assert kernels <= allowed
    assert moved / 1e9 <= gigabytes * 1.01


def test_chunks_are_larger_on_a_gpu():
    assert default_chunk("cpu", 151936) == 110
    assert default_chunk("cuda", 151936) == 1766
    assert default_chunk("mps", 151936) == 110


def make_model(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def scored(model: nn.Module, **settings: Any) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        logp, entropy = completion_logprobs(
            model, ids, PROMPTS, COMPLETIONS, entropy=True, **settings
        )
        (logp * torch.linspace(-1, 1, 7)).sum().backward()
    assert entropy is not None
    return logp, entropy, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_every_number_is_the_same(monkeypatch, tied, chunk_tokens):
    ours = make_model(tied)
    plain = copy.deepcopy(ours)
    logp, entropy, gradients = scored(ours, chunk_tokens=chunk_tokens)
    monkeypatch.setattr(logprobs, "cast_once", lambda layer: layer)
    expected, expected_entropy, expected_gradients = scored(plain, chunk_tokens=chunk_tokens)
    assert torch.equal(logp, expected) and torch.equal(entropy, expected_entropy)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert gradient is not None and torch.equal(gradient, other)


def test_what_autocast_would_not_cast_is_left_alone():
    class Scaled(nn.Linear):
        """Does more than a product."""

    layers = [nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double(), Scaled(4, 4), nn.ReLU()]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(cast_once(layer) is layer for layer in layers)
        layer = nn.Linear(4, 4)
        assert cast_once(layer) is not layer
    assert cast_once(layer) is layer


def test_hooks_and_bias_are_kept():
    layer, seen = nn.Linear(4, 3), []
    layer.register_forward_hook(lambda *call: seen.append(call[2]))
    states = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(states)
        assert torch.equal(cast_once(layer)(states), expected)
    assert len(seen) == 2
