"""What only a GPU shows: `make gpu-check`. With `DEVICE=cpu` the same code runs here, smaller.

Every test prints what it measures. A pass on a CPU says nothing about a GPU.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_rlsched import GRPOModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.lora import add_lora
from lit_rlsched.training.policy import (
    adapter_spec,
    load_policy,
    load_tokenizer,
    named_adapters,
    named_weights,
)
from lit_rlsched.training.weight_sync import PolicyReader
from lit_rlsched.types import Completion, Request, Sampling, stable_hash

DEVICE = os.environ.get("GPU_CHECK")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE is None, reason="`make gpu-check` runs it"),
    pytest.mark.timeout(900),
]
ON_GPU = DEVICE == "cuda"
MODEL = str(Path(__file__).parents[2] / "examples/countdown/model")
GAP = {torch.float32: 5e-3 if ON_GPU else 1e-4, torch.bfloat16: 0.05}
"""Largest mean difference of log-probs of engine and trainer, in nats."""
GONE_ON = {torch.float32: 0.9, torch.bfloat16: 0.4}
"""Least share of tokens that are the same after a pause; with other noise it is a few percent."""
PROMPTS, TOKENS, PAUSE = 16, 64, 24
CACHE = 8.0 if ON_GPU else None
"""GiB of key-value cache: large compared with CUDA graphs, which stay in memory."""


@pytest.fixture
def policy():
    """Its weights differ from the checkpoint's: an engine that never gets them draws others."""
    policy = load_policy(MODEL).to(DEVICE)
    change(policy)
    return policy


@pytest.fixture
def started():
    """Start engines, which end with the test."""
    engines = []

    def start(engine, spec):
        engines.append(engine)
        engine.start(spec)
        return engine

    yield start
    for engine in engines:
        engine.close()


@torch.no_grad()
def change(policy):
    for parameter in policy.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        noise = 0.02 * torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise.to(parameter) * parameter.abs().mean())


def prompts(count=PROMPTS):
    tokenizer = load_tokenizer(MODEL)
    return [
        tokenizer(f"Use {3 + i % 7}, {5 + i % 11} to make {10 + i}.").input_ids
        for i in range(count)
    ]


def requests(asked, tokens=TOKENS, pause_at=None):
    sampling = Sampling(tokens)
    return [Request(f"r{i}", p, i, sampling, (), pause_at) for i, p in enumerate(asked)]


def spec_of(dtype=torch.float32, slots=PROMPTS, **more):
    """An engine whose completions end at their limit."""
    where = torch.device(DEVICE, 0) if ON_GPU else torch.device("cpu")
    return EngineSpec(MODEL, slots, 256, (), dtype, where, **more)


def draw(engine, batch):
    drawn = {request.id: Completion(i) for i, request in enumerate(batch)}
    engine.submit(batch)
    while any(c.finish_reason is None for c in drawn.values()):
        for event in engine.step():
            drawn[event.request_id].take(event, 0)
    return [*drawn.values()]


def tokens_of(drawn):
    return [list(completion.token_ids) for completion in drawn]


@torch.no_grad()
def gap(policy, asked, drawn, dtype=torch.float32):
    """Mean difference of the engine's log-probs from the trainer's."""
    differences = []
    for prompt, completion in zip(asked, drawn, strict=True):
        with nullcontext() if dtype == torch.float32 else torch.autocast(DEVICE, dtype):
            logp, _ = completion_logprobs(
                policy,
                torch.tensor([[*prompt, *completion.token_ids]], device=policy.device),
                torch.tensor([len(prompt)], device=policy.device),
                torch.tensor([len(completion.token_ids)], device=policy.device),
            )
        differences.append((logp[0].float().cpu() - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(differences).mean())


def common(ours, theirs):
    """Tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))


def used():
    """Bytes in use on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("graphs", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_draws_from_the_policy(policy, started, dtype, graphs):
    """Its log-probs, the law of its first tokens, the same seeds twice, and after a pause."""
    engine = VLLMEngine(kv_cache_gib=CACHE, enforce_eager=not graphs)
    started(engine, spec_of(dtype, slots=256))
    engine.wake()
    asked = prompts()
    engine.sync_weights(named_weights(policy), 1)
    first = draw(engine, requests(asked))
    mean = gap(policy, asked, first, dtype)
    print(f"mean log-prob gap {mean:.2e}")
    assert mean < GAP[dtype]

    if dtype == torch.float32:  # rounding would change the law
        check_law(engine, policy, asked[0])

    engine.sync_weights(named_weights(policy), 2)  # empties its prefix cache
    assert tokens_of(draw(engine, requests(asked))) == tokens_of(first)
    engine.sync_weights(named_weights(policy), 3)
    begun = draw(engine, requests(asked, pause_at=PAUSE))
    batch = [
        replace(request, prefix_ids=tuple(completion.token_ids))
        for request, completion in zip(requests(asked), begun, strict=True)
    ]
    same = [
        common(rest, whole[PAUSE:]) if tokens == whole[:PAUSE] else 0
        for tokens, rest, whole in zip(
            tokens_of(begun), tokens_of(draw(engine, batch)), tokens_of(first), strict=True
        )
    ]
    share = sum(same) / (PROMPTS * (TOKENS - PAUSE))
    print(f"same tokens after a pause: {share:.2f}")
    assert share >= GONE_ON[dtype]


@torch.no_grad()
def check_law(engine, policy, prompt):
    """First tokens of 4,096 completions are distributed as the policy says."""
    logits = policy(torch.tensor([prompt], device=policy.device)).logits[0, -1]
    law = logits.double().softmax(-1).cpu()
    counts = torch.zeros_like(law)
    for start in range(0, 4096, 256):
        many = [
            Request(f"l{i}", prompt, stable_hash("law", i), Sampling(1))
            for i in range(start, start + 256)
        ]
        for completion in draw(engine, many):
            counts[completion.token_ids[0]] += 1
    often = law * counts.sum() >= 5
    expected, seen = (torch.cat([of[often], of[~often].sum()[None]]) for of in (law, counts))
    expected *= counts.sum()
    kept = expected >= 5
    statistic, free = float(((seen - expected)[kept] ** 2 / expected[kept]).sum()), kept.sum() - 1
    print(f"first tokens: chi-square {statistic:.1f} with {free} degrees of freedom")
    assert statistic < free + 6 * (2 * free) ** 0.5 + 6


@pytest.mark.parametrize("enable_lora", [False, True])
def test_an_engine_gives_its_memory_back_asleep_and_closed(policy, started, enable_lora):
    """Five cycles of weights, draws and sleep; closed asleep; then another engine starts."""
    before = used() if ON_GPU else 0
    spec, asked = spec_of(), prompts()
    if enable_lora:
        policy = add_lora(load_policy(MODEL), 16, 16, "all-linear").to(DEVICE)
        spec = replace(spec, adapters=adapter_spec(policy))
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    read = named_adapters if enable_lora else named_weights
    for _ in range(2):
        engine = started(VLLMEngine(kv_cache_gib=CACHE, enable_lora=enable_lora), spec)
        asleep, drawn = [], []
        for version in range(5):
            engine.wake()
            engine.sync_weights(read(policy), version)
            drawn.append(draw(engine, requests(asked, 32)))
            awake = used() if ON_GPU else 0
            engine.sleep()
            asleep.append(used() if ON_GPU else 0)
        assert gap(policy, asked, drawn[-1]) < GAP[torch.float32]
        assert all(tokens_of(each) == tokens_of(drawn[0]) for each in drawn)
        print(
            f"MiB: {before >> 20} before, {awake >> 20} awake, {[b >> 20 for b in asleep]} asleep"
        )
        engine.close()
        if ON_GPU:
            assert awake - asleep[-1] >= 0.9 * (awake - before)
            assert asleep[-1] - asleep[0] <= 64 * 2**20, "it grows"
            assert awake - used() >= 0.9 * (awake - before), "closed"


def test_weights_reach_an_engine_in_another_process(policy, started):
    """Which is on the trainer's GPU, and sleeps between two syncs."""
    asked, reader = prompts(), PolicyReader(policy)
    engine = started(ProcessEngine(VLLMEngine(kv_cache_gib=CACHE)), spec_of())
    for version in range(3):
        engine.wake()
        change(policy)
        engine.sync_weights(reader.weights(), version)
        mean = gap(policy, asked, draw(engine, requests(asked, 32)))
        print(f"sync {version}: mean log-prob gap {mean:.2e}")
        assert mean < GAP[torch.float32]
        engine.sleep()
    assert engine.restarts == 0


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_run_trains(fit, precision, rank):
    """Every sync is checked by the run itself; the estimate of memory is printed."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    module = GRPOModule(MODEL, learning_rate=1e-5, lora_rank=rank)
    engine = VLLMEngine() if ON_GPU or precision == "32-true" else TransformersEngine()
    trainer, module, data = fit(
        module,
        trainer={"accelerator": "gpu" if ON_GPU else "cpu", "devices": 1, "precision": precision},
        engine=engine,
        max_completion_length=32,
        micro_batch_tokens=2048,
    )
    assert data.run.num_rounds == 2 and trainer.global_step > 0
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert torch.isfinite(torch.tensor(figures["loss"]))
    mean = figures["sampling/sampling_logp_difference/mean"]
    peak = torch.cuda.max_memory_allocated() / 2**20 if ON_GPU else float("nan")
    print(f"{precision}, LoRA rank {rank}: gap {mean:.2e} nats, peak {peak:.0f} MiB")
    assert mean <= GAP[torch.float32 if precision == "32-true" else torch.bfloat16]
    frequencies = {b.dtype for n, b in module.named_buffers() if n.endswith("inv_freq")}
    assert frequencies == {torch.float32}


@pytest.mark.parametrize("transfer", ["nccl", None] if ON_GPU else [None])
def test_two_engines(policy, started, transfer):
    """On GPUs after the trainer's, by NCCL; on a CPU two processes share its cores."""
    if ON_GPU and torch.cuda.device_count() < 2 + (transfer == "nccl"):
        pytest.skip("needs a GPU for each engine, and with NCCL one more for the trainer")
    pool = EnginePool.of(ProcessEngine(VLLMEngine(kv_cache_gib=CACHE), transfer), 2)
    started(pool, spec_of(slots=2 * PROMPTS, first_gpu=int(transfer == "nccl")))
    asked = prompts()
    pool.wake()
    pool.sync_weights(PolicyReader(policy).weights(), 1)
    drawn = [draw(engine, requests(asked, 32)) for engine in pool.engines]
    means = [gap(policy, asked, each) for each in drawn]
    print(f"weights by {transfer or 'host memory'}: mean log-prob gaps {means}")
    assert max(means) < GAP[torch.float32]
    assert tokens_of(drawn[0]) == tokens_of(drawn[1])
