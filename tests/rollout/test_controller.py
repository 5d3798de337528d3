import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlsched.engines import SimulatedEngine, TransformersEngine
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.rollout.controller import RolloutController, completion_seed
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.types import Completion, Event, Group, Prompt, Sampling
from lit_rlsched.rollout.worker import RolloutWorker
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.rounds import FullRound


def groups(num_prompts, num_generations, limit=16, temperature=1.0):
    return [
        Group(
            f"{p}@0",
            Prompt(str(p), f"prompt {p}", (4 + p % 10, 5, 6)),
            Sampling(limit, temperature),
            [Completion(i) for i in range(num_generations)],
        )
        for p in range(num_prompts)
    ]


@pytest.fixture(scope="module")
def scheduler():
    def reward(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    with RewardScheduler([reward]) as scheduler:
        yield scheduler


def controller(engine, scheduler, slots, refill="continuous", **hooks):
    worker = RolloutWorker(engine, Admission(slots, refill))
    return RolloutController(worker, Scorer(scheduler, lambda ids: str(ids)), seed=1, **hooks)


def simulated(slots, lengths):
    engine = SimulatedEngine(lengths=lengths)
    engine.start(EngineSpec("", slots=slots, max_model_len=64, eos_token_ids=(1,)))
    return engine


@settings(max_examples=25)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from(["continuous", "rounds"]),
    st.randoms(use_true_random=False),
)
def test_every_completion_exactly_once(scheduler, prompts, size, slots, refill, random):
    lengths = {f"{p}@0/{i}": random.randint(1, 16) for p in range(prompts) for i in range(size)}
    plan, seen, ended = groups(prompts, size), [], []
    run = controller(
        simulated(slots, lengths),
        scheduler,
        slots,
        refill,
        on_completion=lambda c: seen.append(id(c)),
        on_group=lambda g: ended.append(g.id),
    )
    done = [g.id for g in run.run(plan, FullRound(prompts), version=0)]
    assert sorted(done) == sorted(ended) == sorted(g.id for g in plan)
    assert sorted(seen) == sorted(id(c) for g in plan for c in g.completions)
    for group in plan:
        for c in group.completions:
            assert len(c.token_ids) == len(c.logprobs) == lengths[f"{group.id}/{c.index}"]
            assert c.scores == [float(len(c.token_ids))]
    trace = run.worker.trace
    assert max(trace.steps["running"]) <= slots
    assert trace.busy_slot_steps == trace.tokens == sum(lengths.values())
    assert not run.worker.busy and run.worker.engine.stats().running == 0


def drawn(policy, slots, refill, scheduler, order=1):
    engine = TransformersEngine()
    engine.start(EngineSpec("", slots=slots, max_model_len=64, eos_token_ids=(1,), policy=policy))
    plan = groups(5, 3)[::order]
    list(controller(engine, scheduler, slots, refill).run(plan, FullRound(5), version=2))
    return {
        f"{g.id}/{c.index}": (c.token_ids, c.logprobs, c.finish_reason, c.scores)
        for g in plan
        for c in g.completions
    }


def test_the_schedule_changes_when_never_what(tiny_policy, scheduler):
    policy = tiny_policy.double()
    plain = drawn(policy, 15, "continuous", scheduler)
    for slots, refill, order in [(1, "continuous", 1), (4, "rounds", 1), (3, "continuous", -1)]:
        other = drawn(policy, slots, refill, scheduler, order)
        assert other.keys() == plain.keys()
        for name, (tokens, logprobs, reason, scores) in plain.items():
            assert other[name][0] == tokens and other[name][2:] == (reason, scores)
            torch.testing.assert_close(
                torch.tensor(other[name][1]), torch.tensor(logprobs), rtol=0, atol=1e-12
            )


def test_stopping_early_aborts_the_rest(scheduler):
    engine = simulated(4, {f"{p}@0/0": 2 + p for p in range(6)})
    run = controller(engine, scheduler, 4)
    first = next(run.run(groups(6, 1), FullRound(6), version=0))
    assert first.id == "0@0"
    assert engine.stats().running == 0 and not run.worker.busy and run.scorer.pending == 0


class NaNEngine(SimulatedEngine):
    """Says that one request's log-probs are not numbers."""

    def step(self):
        return [
            Event(e.request_id, e.token_ids, [math.nan] * len(e.token_ids), e.finish_reason)
            if e.request_id == "1@0/0"
            else e
            for e in super().step()
        ]


def test_a_completion_without_finite_logprobs_is_counted_and_dropped(scheduler):
    engine = NaNEngine(lengths=[3, 4, 5, 2])
    engine.start(EngineSpec("", slots=4, max_model_len=64, eos_token_ids=(1,)))
    run = controller(engine, scheduler, 4)
    plan = groups(2, 2)
    assert len(list(run.run(plan, FullRound(2), version=0))) == 2
    assert run.drops == {"nonfinite_logprob": 1}
    assert plan[1].completions[0].dropped == "nonfinite_logprob"
    assert plan[1].completions[0].scores == [None]
    assert plan[1].completions[1].dropped is None


def test_seeds_depend_on_what_a_completion_is():
    a, b = groups(2, 2)
    seeds = {
        completion_seed(0, a, a.completions[0], 0),
        completion_seed(1, a, a.completions[0], 0),
        completion_seed(0, b, b.completions[0], 0),
        completion_seed(0, a, a.completions[1], 0),
        completion_seed(0, a, a.completions[0], 1),
        completion_seed(0, a, a.completions[0], 0, "val"),
        completion_seed(0, a, Completion(0, [7]), 0),
    }
    assert len(seeds) == 7
    assert completion_seed(0, a, a.completions[0], 0) == 5659309786280544657  # or runs would change


def test_completions_are_scored_while_others_decode(tiny_policy, scheduler):
    engine = TransformersEngine()
    engine.start(EngineSpec("", slots=2, max_model_len=64, eos_token_ids=(1,), policy=tiny_policy))
    decoding = []
    run = controller(engine, scheduler, 2, on_completion=lambda c: decoding.append(run.worker.busy))
    list(run.run(groups(8, 2, limit=40), FullRound(8), version=0))
    assert len(decoding) == 16
    assert sum(decoding) > 8
