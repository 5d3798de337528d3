"""The check after a weight sync stops a wrong engine, and nothing else."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_rlsched.engines import TransformersEngine
from lit_rlsched.engines.base import EngineSpec, Event
from lit_rlsched.rollout import probe
from lit_rlsched.rollout.probe import SyncProbe, robust_mean, tolerance
from lit_rlsched.rollout.types import Prompt

FP32, BF16 = torch.float32, torch.bfloat16
PROMPTS = [Prompt("a", "", (5, 6, 7, 8)), Prompt("b", "", (9, 10, 11))]


@pytest.fixture(scope="module")
def policy():
    config = Qwen3Config(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()


class Noisy(TransformersEngine):
    """Puts one log-prob in twelve off by one, as half precision does now and then."""

    off = 1.0

    def step(self):
        events = []
        for event in super().step():
            self.count = getattr(self, "count", 0) + 1
            at = [
                x - self.off * (hash((self.count * 7919) % 9973) % 12 == 0) for x in event.logprobs
            ]
            events.append(Event(event.request_id, event.token_ids, at, event.finish_reason))
        return events


def check(policy, theirs, trainer=FP32, engine=None, syncs=1, room=48):
    """What the probe says of an engine that decodes with the weights of `theirs`."""
    engine = engine or TransformersEngine()
    spec = EngineSpec("", 2, 4 + room, (), dtype=trainer, policy=theirs)
    engine.start(spec)
    try:
        probed = SyncProbe(engine, spec, policy, PROMPTS, 1.0, nullcontext)
        return [probed.check(version) for version in range(syncs)]
    finally:
        engine.close()


def in_bf16(policy):
    theirs = copy.deepcopy(policy)
    for parameter in theirs.parameters():  # not buffers: angles of positions
        parameter.data = parameter.data.to(BF16)
    return theirs


def not_synced(policy):
    """One weight tensor is another."""
    theirs = copy.deepcopy(policy)
    with torch.no_grad():
        torch.nn.init.normal_(theirs.model.layers[1].mlp.down_proj.weight, std=0.1)
    return theirs


def off_by_one(policy):
    theirs = copy.deepcopy(policy)
    states = [layer.state_dict() for layer in policy.model.layers]
    for i, layer in enumerate(theirs.model.layers):
        layer.load_state_dict(states[(i + 1) % len(states)])
    return theirs


def test_an_engine_in_half_precision_is_in_order_under_a_trainer_in_full(policy):
    (gap,) = check(policy, in_bf16(policy))
    assert 1e-4 < gap < 0.05


@pytest.mark.parametrize("wrong", [not_synced, off_by_one])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_wrong_engine_stops_the_run(policy, wrong, dtype):
    theirs = wrong(policy) if dtype == FP32 else in_bf16(wrong(policy))
    with pytest.raises(RuntimeError, match="does not decode with the weights that are trained"):
        check(policy, theirs, dtype)


def test_a_little_wrong_stops_a_run_in_full_precision(policy):
    theirs = copy.deepcopy(policy)
    with torch.no_grad():
        theirs.model.layers[2].self_attn.o_proj.weight *= 1.01
    with pytest.raises(RuntimeError, match=r"of 288 tokens.*1e-04 allowed between torch.float32"):
        check(policy, theirs)


@pytest.fixture
def drawn(monkeypatch):
    """How many tokens each comparison was made of."""
    drawn, gap_of = [], SyncProbe._gap

    def count(self, *args):
        gap = gap_of(self, *args)
        drawn.append(len(gap))
        return gap

    monkeypatch.setattr(SyncProbe, "_gap", count)
    return drawn


def test_single_tokens_that_are_off_stop_nothing(policy, drawn):
    assert len(check(policy, in_bf16(policy), BF16, Noisy(), syncs=4, room=128)) == 4
    assert drawn.count(256) >= 2, "the first few tokens alone would have stopped it"


@pytest.mark.parametrize(("room", "waves"), [(48, 3), (8, 16), (1, probe.WAVES)])
def test_enough_tokens_are_drawn_whatever_the_limit(policy, room, waves, drawn):
    class FirstIsOff(TransformersEngine):
        def step(self):
            return [
                Event(
                    e.request_id,
                    e.token_ids,
                    [x - (e.request_id.count("/") == 1) for x in e.logprobs],
                    e.finish_reason,
                )
                for e in super().step()
            ]

    check(policy, policy, engine=FirstIsOff(), room=room)
    assert len(drawn) == 1 + waves
    assert sum(drawn[1:]) == waves * 2 * min(room, probe.LONGEST)


def test_what_is_no_number_counts():
    gap = torch.full((100,), 1e-6)
    assert robust_mean(gap) == pytest.approx(1e-6)
    gap[:10] = 5.0
    assert robust_mean(gap) == pytest.approx(1e-6)
    gap[10] = 5.0
    assert robust_mean(gap) > 0.05
    for value in (torch.nan, torch.inf):
        gap[10] = value
        assert not robust_mean(gap) <= 0.05
    assert robust_mean(torch.tensor([0.5])) == 0.5


def test_the_coarser_precision_and_the_device_decide():
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    assert tolerance(FP32, FP32, cpu) == tolerance(torch.float64, FP32, cpu) == 1e-4
    assert tolerance(FP32, FP32, cuda) == 5e-3
    assert tolerance(FP32, BF16, cpu) == tolerance(BF16, FP32, cuda) == 0.05
    assert tolerance(FP32, torch.float16, cuda) == 0.05
