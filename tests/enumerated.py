"""Policies of a few tokens, whose completions can all be enumerated, and their drafts."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

EOS, VOCAB, LIMIT = 1, 4, 3
PROMPT = (2, 3, 0)
SEED = 1


def make_policy(seed, dtype=torch.float64):
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(dtype).eval()


def moved(policy, seed=9, by=0.1):
    """The policy some updates later."""
    later = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in later.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += by * noise.to(parameter)
    return later


def verify(
    drafts,
    policy,
    groups,
    version=4,
    seed=SEED,
    seed_domain="",
    micro_batch_tokens=4096,
    row_cost=None,
):
    update = SimpleNamespace(
        settings=SimpleNamespace(seed=seed, micro_batch_tokens=micro_batch_tokens),
        forward_context=nullcontext,
        learner=SimpleNamespace(row_cost=lambda: row_cost),
    )
    return drafts.verify(groups, policy, version, update, (EOS,), seed_domain)
