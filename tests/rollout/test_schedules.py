"""Every schedule draws the same completions: on real vLLM too, with probes, quanta and pauses."""

from importlib.util import find_spec
from itertools import product

import pytest
import torch
from bare_rollout import rollout_on
from sampled_groups import plan as groups

from lit_rlsched import engines
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.base import RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.scheduling.admission import Admission, SlotSettings
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, PromptHistory
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.token_conditioned import TokenConditioned

LIMIT = 48
SHARED = 40
"""Tokens of each prompt; vLLM shares whole blocks of 32 of them."""
TOKEN_BYTES = 512
PREDICTORS = [None, PromptHistory, TokenConditioned]


class Bench:
    """An engine that is started once for many schedules."""

    def __init__(self, name, model, policy, scheduler, slots=24, limit=LIMIT, budget=None):
        self.engine, self.scheduler, self.policy = getattr(engines, name)(), scheduler, policy
        self.limit = limit
        self.spec = EngineSpec(
            model, slots, SHARED + limit, (1,), policy=policy, kv_cache_bytes=budget
        )
        self.engine.start(self.spec)

    def run(self, admission, predictor=None, probe_tokens=0, rounds=1):
        """Draw the groups `rounds` times; the last trace and what was drawn."""
        worker = RolloutWorker(self.engine, admission)
        lengths = None if predictor is None else CalibratedPredictor(predictor)
        given = {"seed": 1, "lengths": lengths, "probe_tokens": probe_tokens}
        drawn = {}
        for _ in range(rounds):
            self.engine.sync_weights(self.policy.named_parameters(), 0)
            plan = groups(self.limit, 4, 6, SHARED)
            scorer, rule = Scorer(self.scheduler, str), FullRound(len(plan))
            rollout = rollout_on(worker, scorer, plan, rule, **given)
            trace = rollout.trace
            list(rollout.decode())
            assert len(admission) == 0 and not worker.busy
            drawn = {
                f"{g.id}/{c.index}": (c.token_ids, c.finish_reason, c.scores, c.logprobs)
                for g in plan
                for c in g.completions
            }
        return trace, drawn


def same(drawn, plain, atol):
    assert drawn.keys() == plain.keys()
    for name, (*rest, logprobs) in plain.items():
        assert list(drawn[name][:3]) == rest, name
        torch.testing.assert_close(
            torch.tensor(drawn[name][3]), torch.tensor(logprobs), rtol=0, atol=atol
        )


vllm = pytest.param(
    "VLLMEngine",
    marks=pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
)


@pytest.fixture(scope="module", params=[vllm, "TransformersEngine"])
def bench(request, tiny_model, make_policy, scheduler):
    policy = make_policy(tiny_model)
    if request.param == "TransformersEngine":
        policy = policy.double()
    ready = Bench(request.param, tiny_model, policy, scheduler)
    ready.atol = 1e-12 if request.param == "TransformersEngine" else 2e-6
    _, ready.plain = ready.run(Admission(24))
    yield ready
    ready.engine.close()


SCHEDULES = [
    *product([1, 5, 24], ["continuous", "rounds"], ["fifo"], [None], [0]),
    *product([5], ["continuous"], ["shortest_first"], [None, TokenConditioned], [0]),
    *product([5], ["continuous"], ["longest_first"], [PromptHistory, TokenConditioned], [0]),
    *product([5], ["rounds"], ["shortest_first"], [PromptHistory, TokenConditioned], [0]),
    *product([5], ["rounds"], ["longest_first"], [None, TokenConditioned], [0]),
    *product([5], ["continuous"], ["planned"], PREDICTORS[1:], [6]),
    *product([5], ["continuous"], ["planned"], [TokenConditioned], [0]),
    *product([24], ["continuous"], ["planned"], [PromptHistory], [0, 6]),
    (5, "rounds", "longest_first", TokenConditioned, 6),
]


@pytest.mark.mostly_slow(
    "VLLMEngine-5-continuous-fifo-None-0",
    "VLLMEngine-5-rounds-longest_first-TokenConditioned-6",
    "TransformersEngine-24-rounds-fifo-None-0",
)
@pytest.mark.parametrize(("slots", "refill", "order", "predictor", "probe"), SCHEDULES)
def test_a_schedule_changes_when_never_what(bench, slots, refill, order, predictor, probe):
    rounds = 2 if predictor else 1  # it has learned from the first
    trace, drawn = bench.run(
        Admission(slots, refill, order), predictor and predictor(), probe, rounds
    )
    same(drawn, bench.plain, bench.atol)
    assert max(trace.steps["running"]) <= slots
    assert trace.tokens == sum(len(ids) for ids, *_ in drawn.values()) == trace.busy_slot_steps
    longer = sum(len(ids) > probe for ids, *_ in drawn.values()) if probe and slots < 24 else 0
    assert trace.pauses == longer
    if refill == "continuous" and not probe:  # no slot idles while something waits
        ends = trace.spans["end_step"]
        last = max(start for start in trace.spans["start_step"])
        running = trace.steps["running"]
        assert all(n == min(slots, 24) for n in running[:last]) and ends


def test_a_prompt_is_computed_once_a_group(bench):
    trace, _ = bench.run(Admission(5))
    assert trace.total("prefill_tokens") + trace.total("cached_tokens") == 24 * SHARED
    if bench.engine.kv_block:  # whole blocks of the prompt once a group, the rest for each
        rest = SHARED % bench.engine.kv_block
        assert trace.total("prefill_tokens") == 4 * (SHARED - rest) + 24 * rest
    else:  # all but the last token, once for siblings that run at the same time
        assert 4 * (SHARED - 1) + 24 <= trace.total("prefill_tokens") < 24 * SHARED / 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("contexts", "order", "predictor", "probe"),
    [
        (1, "fifo", None, 0),
        (3, "fifo", None, 0),
        (3, "planned", TokenConditioned, 6),
    ],
)
def test_a_memory_budget_is_never_overdrawn(
    tiny_model, make_policy, scheduler, contexts, order, predictor, probe
):
    block, limit, policy = 32, 160, make_policy(tiny_model)
    blocks = contexts * 7  # a context of 200 tokens takes 7
    budget = (blocks + 1) * block * TOKEN_BYTES  # one is vLLM's own
    plain = Bench("VLLMEngine", tiny_model, policy, scheduler, limit=limit)
    _, drawn = plain.run(Admission(24))
    plain.engine.close()

    settings = SlotSettings(memory_budget=budget, order=order)
    spec = EngineSpec(tiny_model, 0, SHARED + limit, (1,))
    slots = settings.engine_slots(VLLMEngine().kv_cache(spec, TOKEN_BYTES), 24, SHARED)
    bench = Bench("VLLMEngine", tiny_model, policy, scheduler, slots, limit, budget)
    try:
        assert bench.engine.kv_capacity == blocks * block
        admission = settings.admission(
            bench.engine.kv_cache(bench.spec, TOKEN_BYTES),
            bench.spec.slots,
            limit,
            settings.resolved_order(predictor is not None),
        )
        trace, in_quanta = bench.run(admission, predictor and predictor(), probe)
        same(in_quanta, drawn, 2e-6)
        # the pool is the budget: had more been let in, vLLM would have had to make room
        assert trace.total("preemptions") == 0
        assert max(trace.steps["kv_tokens"]) > blocks * block / 2
        assert max(trace.steps["running"]) > contexts  # more than fixed slots would let run
        assert trace.pauses > 0
    finally:
        bench.engine.close()
