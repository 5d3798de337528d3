import pytest
import torch

from lit_rlsched.engines import SimulatedEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.rollout.slots import MAX_SLOTS, SlotSettings

SPEC = EngineSpec("", slots=8, max_model_len=200, eos_token_ids=(1,))


def test_the_default_order_needs_a_prediction():
    assert SlotSettings().resolved_order(predicted=False) == "fifo"
    assert SlotSettings().resolved_order(predicted=True) == "longest_first"
    assert SlotSettings().resolved_order(predicted=True, early=True) == "shortest_first"
    assert SlotSettings(order="longest_first").resolved_order(True, early=True) == "longest_first"
    assert SlotSettings(order="planned").resolved_order(predicted=True) == "planned"
    with pytest.raises(ValueError, match="LengthPrediction"):
        SlotSettings(order="planned").resolved_order(predicted=False)


def test_slots_of_an_engine():
    def slots(settings, engine, most=1000):
        return settings.engine_slots(engine, SPEC, token_bytes=4, most=most, shortest=40)

    paged, fixed = SimulatedEngine(kv_block=16), SimulatedEngine(kv_block=None)
    assert slots(SlotSettings(), paged) == MAX_SLOTS
    assert slots(SlotSettings(slots=300), paged) == 300
    assert slots(SlotSettings(slots=300), paged, most=64) == 64
    budget = SlotSettings(memory_budget=5 * 200 * 4)
    assert slots(budget, fixed) == 5  # whole completions
    assert slots(budget, paged) == 1000 // 41  # as many as could begin
    with pytest.raises(ValueError, match="less than one completion"):
        slots(SlotSettings(memory_budget=199 * 4), paged)


@pytest.mark.parametrize(
    ("capacity", "tokens"), [(None, 400), (10**9, 400), (300, 300), (399, 399)]
)
def test_a_budget_is_the_smaller_of_the_users_and_the_engines(capacity, tokens):
    engine = SimulatedEngine(kv_block=1, kv_capacity=capacity)
    admission = SlotSettings(memory_budget=1600).admission(engine, SPEC, 4, 160, "fifo")
    assert admission.budget.tokens == tokens
    assert admission.budget.lease == 20


def test_a_budget_for_fixed_slots():
    engine = SimulatedEngine(kv_block=None)
    admission = SlotSettings(memory_budget=1600).admission(engine, SPEC, 4, 160, "fifo")
    assert admission.budget is None and admission.slots == SPEC.slots


@pytest.mark.parametrize("settings", [SlotSettings(slots=8), SlotSettings(memory_budget=6400)])
@pytest.mark.parametrize(("capacity", "advice"), [(450, "Use `slots=2`"), (150, "Not even one")])
def test_more_than_the_engine_has_room_for(settings, capacity, advice):
    engine = SimulatedEngine(kv_block=None, kv_capacity=capacity)
    with pytest.raises(ValueError, match=advice):
        settings.admission(engine, SPEC, 4, 160, "fifo")


def test_nobody_who_asks_for_nothing_is_refused():
    engine = SimulatedEngine(kv_capacity=450)  # vLLM then makes room by preemption
    assert SlotSettings().admission(engine, SPEC, 4, 160, "fifo").slots == 8


def test_precision_of_the_cache(tiny_policy):
    spec = EngineSpec("", 8, 200, (1,), dtype=torch.bfloat16, policy=tiny_policy)
    assert TransformersEngine().cache_dtype(spec) == torch.float32  # the policy's
    assert VLLMEngine().cache_dtype(spec) == torch.bfloat16
    assert VLLMEngine(dtype="float16").cache_dtype(spec) == torch.float16
