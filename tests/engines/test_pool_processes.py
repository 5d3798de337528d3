"""Two engines in processes of their own: slow, stale, killed, stopped, and one less after a resume.

`tests/rollout/test_pool.py` plays the processes, and tests what they draw.
"""

import os
import signal
import time
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from bare_rollout import hooks_of, rollout_on
from lightning.pytorch.callbacks import ModelCheckpoint
from placements import process_only
from sampled_groups import GENERATIONS, PROMPTS, plan
from seen_rounds import Rounds
from struck_engines import patience

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import MicroGroupSampling, SortedBatching
from lit_rlsched.engines import (
    ProcessEngine,
    SimulatedEngine,
    TransformersEngine,
    VLLMEngine,
)
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.training.policy import named_weights
from lit_rlsched.training.weight_sync import WeightSync

LIMIT = 200


def draw(engine, rule, slots=12, on_group=lambda group: None):
    """Groups after a round, who ran when, and the round's state."""
    worker = engine.make_worker(Admission(slots // len(engine.engines)))
    hooks, groups = hooks_of(group_ended=on_group), plan(LIMIT)
    rollout = rollout_on(worker, Unscored(), groups, rule, hooks=hooks, seed=1)
    trace = rollout.trace
    list(rollout.decode())
    assert not worker.busy and not any(engine.each(lambda one: one.stats().running))
    columns = ("request", "slot", "start_step", "end_step", "tokens")
    spans = sorted(zip(*(trace.spans[name] for name in columns), strict=True))
    return groups, spans, [group.id for group in rollout.state.decoded]


def completions(groups):
    return [c for group in groups for c in group.completions]


@pytest.fixture(scope="module")
def policy(tiny_model, make_policy):
    return make_policy(tiny_model).double()


@pytest.fixture(scope="module")
def spec(tiny_model, policy):
    return EngineSpec(tiny_model, 12, LIMIT + 48, (1,), dtype=torch.float64, policy=policy)


@pytest.fixture(scope="module")
def alone(spec):
    engine = TransformersEngine()
    engine.start(spec)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stale")


@pytest.fixture(scope="module")
def two(placement, spec, policy, folder):
    class Wild(TransformersEngine):
        """Takes its time, and misses a tensor if a file tells it to."""

        def step(self):
            time.sleep(int.from_bytes(os.urandom(1)) ** 4 / 255**4 * 0.02)
            return super().step()

        def sync_weights(self, named_tensors, version):
            stale = (folder / f"engine {self._spec.index}").exists()
            missed = "model.layers.1.mlp.down_proj.weight" if stale else None
            super().sync_weights([n for n in named_tensors if n[0] != missed], version)

    engine = EnginePool([placement(Wild()) for _ in range(2)])
    engine.start(spec)
    engine.sync_weights(named_weights(policy), 0)
    yield engine
    engine.close()


@pytest.mark.mostly_slow("process-partial")
@pytest.mark.parametrize("name", ["full", "partial", "on_policy"])
def test_how_slow_each_engine_is_changes_nothing(alone, two, name):
    rule = FullRound(PROMPTS)
    if name != "full":
        rule = SortedRound(2, PROMPTS, GENERATIONS, mode=name)
    groups, *figures = draw(two, rule)
    again, *again_figures = draw(two, rule)
    assert [c.token_ids for c in completions(groups)] == [c.token_ids for c in completions(again)]
    assert figures == again_figures
    whole = completions(draw(alone, FullRound(PROMPTS))[0])
    for one, other in zip(completions(groups), whole, strict=True):
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        assert one.logprobs == pytest.approx(other.logprobs[: len(one.logprobs)], abs=1e-9)
        assert name != "full" or one.finished


def test_the_check_after_a_sync_names_the_engine(two, spec, policy, folder):
    sync = WeightSync(two, spec, policy, probe=[group.prompt for group in plan(LIMIT)[:2]])
    assert sync(1)["sync/max_logp_diff"] < 1e-6
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    (folder / "engine 1").touch()
    try:
        with torch.no_grad():
            policy.model.layers[1].mlp.down_proj.weight.mul_(-1)
        with pytest.raises(RuntimeError, match=r"^Engine 1 of 2 does not decode with the weights"):
            sync(2)
    finally:
        (folder / "engine 1").unlink()
        with torch.no_grad():
            for parameter, value in zip(policy.parameters(), before, strict=True):
                parameter.copy_(value)
    assert sync(3)["sync/max_logp_diff"] < 1e-6


def test_engines_share_the_cores_and_one_copy_of_the_weights(two):
    own = [sorted(os.sched_getaffinity(engine.pid)) for engine in two.engines]
    if type(two.engines[0]) is ProcessEngine and os.cpu_count() > 1:  # Ray shares out itself
        assert own[0] and not set(own[0]) & set(own[1]) and len(own[0]) == len(own[1])
    handed = [engine._weights[0] for engine in two.engines]
    assert handed[0] is handed[1]


@pytest.mark.slow
@process_only
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_one_of_two_is_killed_or_stopped_in_the_middle_of_a_round(alone, two, how, monkeypatch):
    for engine in two.engines:
        limit = partial(lambda engine, starts: patience(engine), engine)
        monkeypatch.setattr(engine.child, "_limit_of", limit)
    before, killed = [engine.restarts for engine in two.engines], []

    def kill_once(group):
        if not killed:
            killed.append(os.kill(two.engines[1].pid, how))

    with pytest.warns(UserWarning, match="The process of engine 1 of 2 d"):
        groups, spans, _ = draw(two, FullRound(PROMPTS), 6, on_group=kill_once)
    assert [engine.restarts for engine in two.engines] == [before[0], before[1] + 1]
    whole = completions(draw(alone, FullRound(PROMPTS))[0])
    assert [c.token_ids for c in completions(groups)] == [c.token_ids for c in whole]
    assert sum(tokens for *_, tokens in spans) == sum(len(c.token_ids) for c in whole)


@pytest.mark.slow
def test_one_of_two_that_does_not_start_ends_both():
    class Refusing(SimulatedEngine):
        def start(self, spec):
            if spec.index == 1:
                raise ValueError("not with this model")
            super().start(spec)

    pool = EnginePool.of(Refusing(), 2)
    with pytest.raises(ValueError, match="not with this model") as error:
        pool.start(EngineSpec("", 2, 64, (1,)))
    assert "In the process of engine 1 of 2:" in error.value.__notes__[0]
    assert [engine.pid for engine in pool.engines] == [None, None]


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_engines(fit, tmp_path, tiny_model):
    """And draws what a run on one engine draws."""

    def module():  # engines in processes round their log-probs to float32: they are not used
        return GRPOModule(tiny_model, learning_rate=1e-3, importance_sampling_mode=None)

    whole, double = Rounds(), {"precision": "64-true", "max_epochs": 4}
    slots = MicroGroupSampling(slots=8)
    _, alone, _ = fit(module(), callbacks=[whole, slots], trainer=double)
    for first, then in ((2, 1), (1, 2)):
        halves = Rounds()
        saved = ModelCheckpoint(tmp_path / str(first), save_last=True, every_n_epochs=1)
        save = {"max_epochs": 2, "enable_checkpointing": True}
        fit(module(), callbacks=[halves, slots, saved], trainer=double | save, num_engines=first)
        path = str(tmp_path / str(first) / "last.ckpt")
        _, other, data = fit(
            module(), callbacks=[halves, slots], trainer=double, num_engines=then, ckpt_path=path
        )
        assert len(data.run.settings.engine.engines) == then
        for one, same in zip(halves.rounds, whole.rounds, strict=True):
            assert [g.id for g in one.groups] == [g.id for g in same.groups]
            tokens = [[c.token_ids for c in r.completions] for r in (one, same)]
            assert tokens[0] == tokens[1]
            engines = one.metrics.get("rollout/engines", 1)
            assert engines == (first if one.number < 2 else then)
        for ours, theirs in zip(other.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_pool_of_prompts_is_left_to_another_number_of_engines(fit, tmp_path):
    """Rounds that end early keep unfinished completions, none of which is lost."""
    rounds, slots = Rounds(), MicroGroupSampling(slots=6)
    saved = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    settings = {"prompts_per_round": 2, "max_completion_length": 64}
    fit(
        callbacks=[rounds, saved, SortedBatching(3, mode="partial"), slots],
        trainer={"max_epochs": 1, "enable_checkpointing": True},
        num_engines=2,
        **settings,
    )
    fit(
        callbacks=[rounds, SortedBatching(3, mode="partial"), slots],
        trainer={"max_epochs": 3},
        ckpt_path=str(tmp_path / "last.ckpt"),
        **settings,
    )
    trained = [group.id for round in rounds.rounds for group in round.groups]
    assert len(trained) == len(set(trained)) >= 6
    for c in (c for round in rounds.rounds for c in round.completions):
        assert sum(tokens for _, tokens in c.segments) == len(c.token_ids)
    kept = [c.segments for c in rounds.rounds[1].completions if len(c.segments) > 1]
    assert kept, "completions went on in the other engine"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.spawned
def test_two_vllm_engines_draw_what_one_draws(tiny_model, make_policy):
    policy = make_policy(tiny_model)
    spec = EngineSpec(tiny_model, 12, LIMIT + 48, (1,), policy=policy)
    drawn = []
    for engine in (VLLMEngine(), EnginePool.of(VLLMEngine(), 2)):
        engine.start(spec)
        try:
            sync = WeightSync(
                engine, spec, policy, probe=[group.prompt for group in plan(LIMIT)[:2]]
            )
            assert sync(0)["sync/max_logp_diff"] < 1e-4
            engine.wake()
            drawn.append(completions(draw(engine, FullRound(PROMPTS), 6)[0]))
            engine.sleep()
        finally:
            engine.close()
    assert [c.token_ids for c in drawn[0]] == [c.token_ids for c in drawn[1]]
    ours, theirs = ([x for c in cs for x in c.logprobs] for cs in drawn)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 5e-7
