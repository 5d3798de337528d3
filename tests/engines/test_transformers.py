import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lit_rlsched.engines import transformers as engine_module
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.transformers import TransformersEngine
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling

Drawn = dict[str, tuple[list[int], list[float]]]
RULES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 9},
    {"min_p": 0.05},
]


def start(policy: nn.Module | None, slots: int = 8, model: str = "") -> TransformersEngine:
    engine = TransformersEngine()
    engine.start(EngineSpec(model, slots, 192, (1,), policy=policy))
    return engine


def jobs(count: int = 20) -> list[Request]:
    """Groups of 4 on prompts of 1 to 61 tokens, with all kinds of sampling and of limits."""
    prompts = [[4 + (3 * n + 5 * i) % 62 for i in range(1 + 15 * n)] for n in range(5)]
    return [
        Request(
            f"r{i}",
            prompts[i // 4 % 5],
            1000 + i,
            Sampling(5 + 23 * i % 90, **RULES[i % len(RULES)]),
        )
        for i in range(count)
    ]


def run(engine: TransformersEngine, waiting: list[Request]) -> Drawn:
    """Keep the slots full until everything has finished."""
    drawn: Drawn = {request.id: ([], []) for request in waiting}
    waiting, running = list(waiting), 0
    while waiting or running:
        free = engine._spec.slots - running
        engine.submit(waiting[:free])
        running += len(waiting[:free])
        del waiting[:free]
        for event in engine.step():
            drawn[event.request_id][0].extend(event.token_ids)
            drawn[event.request_id][1].extend(event.logprobs)
            running -= event.finish_reason is not None
    return drawn


def assert_same(one: Drawn, other: Drawn) -> None:
    for name, (tokens, logprobs) in one.items():
        assert other[name][0] == tokens
        assert other[name][1] == pytest.approx(logprobs, abs=1e-12)


@torch.no_grad()
def score(policy: nn.Module, request: Request, tokens: list[int]) -> list[float]:
    ids = torch.tensor([[*request.prompt_ids, *tokens]])
    logp = policy(ids).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.mostly_slow("8")
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_schedule_does_not_change_a_draw(tiny_policy: PreTrainedModel, slots: int) -> None:
    policy = tiny_policy.double()
    expected = run(start(policy, 20), jobs())
    assert len({len(tokens) for tokens, _ in expected.values()}) > 5
    shuffled = sorted(jobs(), key=lambda request: request.seed * 7919 % 101)
    assert_same(expected, run(start(policy, slots), jobs()))
    assert_same(expected, run(start(policy, slots), jobs()[::-1]))
    assert_same(expected, run(start(policy, slots), shuffled))


def test_logprobs_are_exact(tiny_policy: PreTrainedModel) -> None:
    policy = tiny_policy.double()
    batch = [replace(r, sampling=Sampling(r.sampling.max_completion_length)) for r in jobs()]
    drawn = run(start(policy, 5), batch)
    for request in batch:
        tokens, logprobs = drawn[request.id]
        assert logprobs == pytest.approx(score(policy, request, tokens), abs=1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_models(attention: str) -> None:
    """Soft caps, a window that never slides, several query heads per key head, dropout, bf16."""
    sizes = {
        "vocab_size": 67,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "attn_implementation": attention,
    }
    gemma = Gemma2Config(**sizes, head_dim=16, final_logit_softcapping=2.0, sliding_window=192)
    if not Gemma2ForCausalLM._supports_sdpa:  # transformers 5.23: not with soft caps
        gemma._attn_implementation = "eager"
    qwen = Qwen2Config(**sizes, attention_dropout=0.5)
    for policy, tolerance in (
        (Gemma2ForCausalLM(gemma), 1e-4),
        (Qwen2ForCausalLM(qwen), 1e-4),
        (Qwen2ForCausalLM(qwen).bfloat16(), 0.2),
    ):
        attention = policy.config._attn_implementation
        policy.train()
        request = Request("r", [5, 6, 7, 8, 9], 3, Sampling(60))
        drawn = run(start(policy), [request, *jobs(6)])
        policy.eval()
        assert drawn["r"][1] == pytest.approx(score(policy, request, drawn["r"][0]), abs=tolerance)
        assert policy.config._attn_implementation == attention


def test_a_peft_policy_decodes_with_its_adapter(tiny_policy: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    policy = peft.get_peft_model(copy.deepcopy(tiny_policy), config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    request = Request("r", [5, 6, 7], 0, Sampling(20))
    policy.train()
    tokens, logprobs = run(start(policy), [request])["r"]
    assert logprobs == pytest.approx(score(policy.eval(), request, tokens), abs=1e-4)
    assert logprobs != pytest.approx(score(tiny_policy, request, tokens), abs=1e-2)


def test_the_trainer_does_not_notice(tiny_policy: PreTrainedModel) -> None:
    tiny_policy.train()
    tiny_policy.model.layers[1].eval()
    before = {name: module.training for name, module in tiny_policy.named_modules()}
    random_state = torch.get_rng_state()
    engine = start(tiny_policy)
    run(engine, jobs(8))
    assert {name: module.training for name, module in tiny_policy.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()
    tiny_policy(torch.tensor([[5, 6, 7]])).logits.sum().backward()  # nothing left in inference mode


def test_flags_come_back_after_an_error(
    tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_policy.train()
    engine = start(tiny_policy)
    engine.submit(jobs(2))
    monkeypatch.setattr(tiny_policy.lm_head, "forward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert tiny_policy.model.layers[0].training
    assert tiny_policy.config._attn_implementation == "sdpa"


def test_shared_prompts_are_computed_once(tiny_policy: PreTrainedModel) -> None:
    engine = start(tiny_policy)
    group = [Request(f"g{i}", [4 + j for j in range(50)], i, Sampling(20)) for i in range(6)]
    engine.submit(group[:4])
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.cached_tokens) == (49 + 4, 3 * 49)
    engine.step()
    engine.submit(group[4:])  # copied from one that runs
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.cached_tokens) == (49 + 6, 5 * 49)
    assert (stats.running, stats.kv_tokens) == (6, 4 * 51 + 2 * 50)


def test_many_prompts_are_prefilled_in_several_passes(
    tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy.double()
    expected = run(start(policy), jobs())
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 60)
    assert_same(expected, run(start(policy), jobs()))


def test_the_cache_is_no_larger_than_it_needs_to_be(tiny_policy: PreTrainedModel) -> None:
    engine = start(tiny_policy, slots=1000)
    engine.submit([Request("r", [5] * 10, 0, Sampling(4))])
    engine.step()
    keys, values = engine._cache._layers[0]
    assert keys.shape == values.shape == (1, 1, 18, 32)
    part = engine.abort(["r"])["r"]
    assert part.token_ids.itemsize + part.logprobs.itemsize == 12, "bytes of a running token"
    engine.sleep()
    assert not engine._cache._layers


def test_without_a_policy_it_has_a_copy_of_its_own(
    tiny_model: str, tiny_policy: PreTrainedModel
) -> None:
    engine = start(None, model=tiny_model)
    request = Request("r", [5, 6, 7], 0, Sampling(30))
    assert run(engine, [request]) == run(start(tiny_policy), [request])
    with torch.no_grad():
        tiny_policy.model.norm.weight *= 1.5
    assert run(engine, [request]) != run(start(tiny_policy), [request])
    engine.sync_weights(tiny_policy.named_parameters(), 4)
    assert engine.version == 4
    assert run(engine, [request]) == run(start(tiny_policy), [request])
    with pytest.raises(KeyError, match="unheard"):
        engine.sync_weights([("unheard.of", torch.zeros(1))], 5)


def test_sliding_windows_are_refused() -> None:
    config = MistralConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=64,
    )
    with pytest.raises(UsageError, match=r"'mistral'.*sliding_attention.*VLLMEngine"):
        start(MistralForCausalLM(config))
    config.sliding_window = None
    start(MistralForCausalLM(config))
