import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines import SimulatedEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.process_engine import ProcessEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.scheduling.admission import KVCache, SlotSettings
from lit_rlsched.settings import UsageError

SPEC = EngineSpec("", slots=8, max_model_len=200, eos_token_ids=(1,))


def admission_of(settings, engine, spec=SPEC):
    return settings.admission(engine.kv_cache(spec, 4), spec.slots, 160, "fifo")


def test_the_default_order_needs_a_prediction():
    assert SlotSettings().resolved_order(predicted=False) == "fifo"
    assert SlotSettings().resolved_order(predicted=True) == "longest_first"
    assert SlotSettings().resolved_order(predicted=True, early=True) == "shortest_first"
    assert SlotSettings(order="longest_first").resolved_order(True, early=True) == "longest_first"
    assert SlotSettings(order="planned").resolved_order(predicted=True) == "planned"
    assert SlotSettings(order="fifo").resolved_order(predicted=False) == "fifo"
    with pytest.raises(UsageError, match="LengthPrediction"):
        SlotSettings(order="planned").resolved_order(predicted=False)


def test_slots_of_an_engine():
    def slots(settings, engine, most=1000):
        return settings.engine_slots(engine.kv_cache(SPEC, 4), most, shortest=40)

    paged, fixed = SimulatedEngine(kv_block=16), SimulatedEngine(kv_block=None)
    assert slots(SlotSettings(), paged) == 256
    assert slots(SlotSettings(), paged, most=64) == 64
    assert slots(SlotSettings(slots=300), paged) == 300
    assert slots(SlotSettings(slots=300), paged, most=64) == 64
    budget = SlotSettings(memory_budget=5 * 200 * 4)
    assert slots(budget, fixed) == 5  # whole completions
    assert slots(budget, paged) == 1000 // 41  # as many as could begin
    with pytest.raises(UsageError, match="less than one completion"):
        slots(SlotSettings(memory_budget=199 * 4), paged)


@pytest.mark.parametrize(
    ("name", "gib", "slots"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, 1024),
        ("NVIDIA A100-SXM4-80GB", 79.2, 256),
        ("NVIDIA L4", 22.5, 256),
    ],
)
def test_slots_by_default_are_vllms(monkeypatch, name, gib, slots):
    gpu = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    spec = replace(SPEC, device=torch.device("cuda"))
    for engine in (VLLMEngine(), ProcessEngine(VLLMEngine())):
        assert engine.most_slots(spec) == slots and engine.most_slots(SPEC) == 256
        cache = engine.kv_cache(spec, 4)
        for settings in (SlotSettings(), SlotSettings(memory_budget=2**20)):
            assert settings.engine_slots(cache, 2000, 40, engine.most_slots(spec)) == slots
    monkeypatch.undo()
    assert VLLMEngine().most_slots(spec) == 256  # an estimate for a GPU elsewhere


@pytest.mark.parametrize(
    ("capacity", "slots"), [(None, 1024), (10**9, 1024), (60_000, 600), (10_000, 256), (450, 256)]
)
def test_slots_by_default_follow_from_the_cache(capacity, slots):
    """What it holds of completions half as long as they may get, 200 tokens, and 256 at least."""
    spec = replace(SPEC, slots=1024)
    engine = SimulatedEngine(kv_block=1, kv_capacity=capacity)
    assert admission_of(SlotSettings(), engine, spec).slots == slots
    if capacity is None or capacity > 1024 * 200:  # what was asked for is kept, or refused
        assert admission_of(SlotSettings(slots=1024), engine, spec).slots == 1024


@pytest.mark.parametrize(
    ("capacity", "tokens"), [(None, 400), (10**9, 400), (300, 300), (399, 399)]
)
def test_a_budget_is_the_smaller_of_the_users_and_the_engines(capacity, tokens):
    engine = SimulatedEngine(kv_block=1, kv_capacity=capacity)
    admission = admission_of(SlotSettings(memory_budget=1600), engine)
    assert admission.budget.tokens == tokens
    assert admission.budget.quantum == 20 and admission.budget.block == 1


def test_a_budget_for_fixed_slots():
    engine = SimulatedEngine(kv_block=None)
    admission = admission_of(SlotSettings(memory_budget=1600), engine)
    assert admission.budget is None and admission.slots == SPEC.slots


@pytest.mark.parametrize("settings", [SlotSettings(slots=8), SlotSettings(memory_budget=6400)])
@pytest.mark.parametrize(
    ("capacity", "advice"), [(450, r"\. Use `slots=2`, a"), (150, r"\. Not even one fits\. Use a")]
)
def test_more_than_the_engine_has_room_for(settings, capacity, advice):
    engine = SimulatedEngine(kv_block=None, kv_capacity=capacity)
    with pytest.raises(UsageError, match=advice):
        admission_of(settings, engine)


def test_what_slots_need_and_what_the_engine_has():
    """8 slots of 200 tokens of 2**20 bytes; 1600 tokens are enough, and 1599 are not."""
    settings, cache = SlotSettings(slots=8), KVCache(2**20, 200, capacity=1600)
    assert settings.admission(cache, 8, 160, "fifo").slots == 8
    with pytest.raises(UsageError, match=r"need 1\.56 GiB .* the engine has 0\.781 GiB\. Use"):
        settings.admission(replace(cache, capacity=800), 8, 160, "fifo")
    with pytest.raises(UsageError, match="Use `slots=7`"):
        settings.admission(replace(cache, capacity=1599), 8, 160, "fifo")


@pytest.mark.parametrize("settings", [SlotSettings(), SlotSettings().share(2)])
def test_nobody_who_asks_for_nothing_is_refused(settings):
    engine = SimulatedEngine(kv_capacity=450)  # vLLM then makes room by preemption
    assert admission_of(settings, engine).slots == 8


@given(
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 2**40),
    st.integers(1, 9),
    st.sampled_from(["continuous", "rounds"]),
    st.sampled_from([None, "fifo", "planned"]),
)
def test_engines_have_equal_shares_of_what_was_set(slots, budget, engines, refill, order):
    settings = SlotSettings(slots, budget, refill, order)
    if slots and slots % engines:
        with pytest.raises(UsageError, match=rf"slots={slots}\)` with `num_engines={engines}`"):
            settings.share(engines)
        settings = replace(settings, slots=slots * engines)
    each = settings.share(engines)
    assert (each.refill, each.order, each.engines) == (refill, order, engines)
    for name in ("slots", "memory_budget"):
        whole, share = getattr(settings, name), getattr(each, name)
        assert (share is None) == (whole is None)
        if whole is not None:
            assert type(share) is int and whole - engines < share * engines <= whole


@pytest.mark.parametrize(("engines", "where"), [(1, ""), (2, " on each of 2 engines")])
@pytest.mark.parametrize("kv_block", [16, None])
def test_a_budget_is_too_small_for_each_engine(engines, where, kv_block):
    cache = SimulatedEngine(kv_block=kv_block).kv_cache(SPEC, 4)
    settings = SlotSettings(memory_budget=199 * 4 * engines).share(engines)
    with pytest.raises(UsageError, match=rf"^`memory_budget=796` bytes{where} is less than one"):
        settings.engine_slots(cache, 99, shortest=40)


def test_precision_of_the_cache(tiny_policy):
    spec = EngineSpec("", 8, 200, (1,), dtype=torch.bfloat16, policy=tiny_policy)
    assert TransformersEngine().cache_dtype(spec) == torch.float32  # the policy's
    assert VLLMEngine().cache_dtype(spec) == torch.bfloat16
    assert VLLMEngine(dtype="float16").cache_dtype(spec) == torch.float16


def test_an_admission_has_the_order_and_the_refill_that_were_chosen():
    caches = [KVCache(4, 200, 16), KVCache(4, 200, 16, 4096)]
    every = itertools.product(("fifo", "longest_first"), caches, (None, 4096))
    for order, cache, budget in every:
        settings = SlotSettings(slots=4, refill="rounds", memory_budget=budget)
        admission = settings.admission(cache, 4, 160, order)
        assert (admission.order, admission.refill, admission.slots) == (order, "rounds", 4)


def test_a_budget_has_room_for_one_whole_completion():
    """In whole blocks, and one that the engine keeps."""
    cache = KVCache(token_bytes=4, longest=100, block=16)
    assert cache.whole == 112
    enough = SlotSettings(memory_budget=112 * 4)
    assert enough.admission(cache, 8, 90, "fifo").budget.tokens == 112
    with pytest.raises(UsageError, match=r"hold 111 tokens of cache.* 112 tokens or 448 b"):
        SlotSettings(memory_budget=112 * 4 - 1).admission(cache, 8, 90, "fifo")
    assert SlotSettings(memory_budget=128 * 4).engine_slots(cache, 99, 10) == 128 // 11
    with pytest.raises(UsageError, match="less than one completion"):
        SlotSettings(memory_budget=128 * 4 - 1).engine_slots(cache, 99, 10)
    assert SlotSettings(memory_budget=128 * 4).engine_slots(cache, 99, 200) == 1
    assert SlotSettings(memory_budget=128 * 4).engine_slots(cache, 3, 10) == 3
    assert enough.admission(cache, 8, 90, "fifo").budget.block == 16
    quantum = enough.admission(cache, 8, 900, "fifo").budget.quantum
    assert quantum == 113 and enough.admission(cache, 8, 90, "fifo").budget.quantum == 16
    whole = KVCache(token_bytes=10, longest=10)
    assert [SlotSettings(memory_budget=n).engine_slots(whole, 9, 1) for n in (100, 199)] == [1, 1]
    with pytest.raises(UsageError, match=r"^`memory_budget=99` bytes is less than one"):
        SlotSettings(memory_budget=99).engine_slots(whole, 9, 1)
