"""The check after a weight sync stops a wrong engine, and nothing else."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rlsched.data.tasks import Countdown
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.engines.base import Event
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.training import weight_sync as probe
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.policy import load_policy, load_tokenizer
from lit_rlsched.training.weight_sync import WeightSync, robust_mean, tolerance
from lit_rlsched.types import Prompt

FP32, BF16 = torch.float32, torch.bfloat16
aten = torch.ops.aten
MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
"""A trained one: of a random one every token is as far off as the others."""


@pytest.fixture(scope="module")
def policy():
    return load_policy(str(MODEL)).eval()


@pytest.fixture(scope="module")
def prompts():
    encode = load_tokenizer(str(MODEL)).apply_chat_template
    questions = [row["prompt"] for row in Countdown(split="train", size=2).rows()]
    ids = [encode(q, add_generation_prompt=True, return_dict=True)["input_ids"] for q in questions]
    return [Prompt(str(i), "", tuple(each)) for i, each in enumerate(ids)]


@pytest.fixture
def check(policy, prompts):
    """What the probe says of an engine that decodes with the weights of `theirs`."""

    def check(theirs, trainer=FP32, engine=None, syncs=1, room=128):
        engine = engine or TransformersEngine()
        longest = max(len(prompt.token_ids) for prompt in prompts)
        spec = EngineSpec("", 2, longest + room, (), dtype=trainer, policy=theirs)
        engine.start(spec)
        try:
            probed = WeightSync(engine, spec, policy, probe=prompts)
            return [probed.check(version) for version in range(syncs)]
        finally:
            engine.close()

    return check


def in_bf16(policy):
    theirs = copy.deepcopy(policy)
    for parameter in theirs.parameters():  # not buffers: angles of positions
        parameter.data = parameter.data.to(BF16)
    return theirs


def not_synced(policy, name):
    """One weight matrix is another."""
    theirs = copy.deepcopy(policy)
    weight = theirs.model.layers[1].get_submodule(name).weight
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        torch.nn.init.normal_(weight, std=weight.std().item())
    return theirs


def off_by_one(policy):
    theirs = copy.deepcopy(policy)
    states = [layer.state_dict() for layer in policy.model.layers]
    for i, layer in enumerate(theirs.model.layers):
        layer.load_state_dict(states[(i + 1) % len(states)])
    return theirs


WRONG = {
    "layers off by one": off_by_one,
    **{
        name: partial(not_synced, name=name)
        for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.k_proj", "self_attn.o_proj")
    },
}


@pytest.fixture
def drawn(monkeypatch):
    """How many tokens each comparison was made of."""
    drawn, gap_of = [], WeightSync._gap

    def count(self, *args):
        gap = gap_of(self, *args)
        drawn.append(len(gap))
        return gap

    monkeypatch.setattr(WeightSync, "_gap", count)
    return drawn


class RoundedProducts(TorchDispatchMode):
    """Rounds what goes into matrix products to so many bits of mantissa: TF32 keeps 10, bf16 7."""

    def __init__(self, bits):
        super().__init__()
        self.dropped = 23 - bits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            args = [self.round(x) if isinstance(x, torch.Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))

    def round(self, x):
        half, kept = 1 << (self.dropped - 1), -1 << self.dropped
        return ((x.contiguous().view(torch.int32) + half) & kept).view(FP32)


@pytest.fixture(scope="module")
def completions(policy, prompts):
    """64 tokens of the policy's for each prompt."""
    spec = EngineSpec("", 2, max(len(p.token_ids) for p in prompts) + 64, (), policy=policy)
    engine = TransformersEngine()
    engine.start(spec)
    drawn = WeightSync(engine, spec, policy, probe=prompts)._draw(engine, 0, 64)
    engine.close()
    return [completion.token_ids for completion in drawn]


@pytest.fixture
def logprobs_of(prompts, completions):
    @torch.no_grad()
    def logprobs_of(model):
        scored = []
        for prompt, tokens in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt.token_ids, *tokens]])
            lengths = torch.tensor([len(prompt.token_ids)]), torch.tensor([len(tokens)])
            scored.append(completion_logprobs(model, ids, *lengths)[0][0])
        return torch.cat(scored)

    return logprobs_of


@pytest.mark.parametrize(
    ("bits", "dtype", "allowed"), [(10, FP32, 5e-3), (7, BF16, 0.05)], ids=["tf32", "bf16"]
)
def test_what_a_gpu_rounds_is_within_the_tolerance_and_a_wrong_matrix_is_not(
    policy, logprobs_of, bits, dtype, allowed
):
    assert tolerance(dtype, dtype, torch.device("cuda")) == allowed
    exact = logprobs_of(policy)

    def gap(theirs):
        with sdpa_kernel(SDPBackend.MATH), RoundedProducts(bits):  # whose products are in sight
            return (logprobs_of(theirs) - exact).abs()

    rounding = gap(policy)
    # more than on a CPU; and both sides of the comparison may round
    assert probe.TOLERANCE < rounding.mean() < allowed / 2
    for name in ("mlp.down_proj", "self_attn.k_proj"):
        assert robust_mean(gap(not_synced(policy, name))) > probe.SLACK * allowed


def test_an_engine_in_half_precision_is_in_order_under_a_trainer_in_full(policy, check):
    (gap,) = check(in_bf16(policy))
    assert gap > 1e-3


@pytest.mark.mostly_slow("layers off by one")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_engine_stops_the_run(policy, check, wrong):
    for dtype, theirs in ((FP32, WRONG[wrong](policy)), (BF16, in_bf16(WRONG[wrong](policy)))):
        with pytest.raises(RuntimeError, match="does not decode with the weights that are tr"):
            check(theirs, dtype)


def test_a_little_wrong_stops_a_run_in_full_precision(policy, check):
    theirs = copy.deepcopy(policy)
    with torch.no_grad():
        theirs.model.layers[2].self_attn.o_proj.weight *= 1.1
    with pytest.raises(RuntimeError, match=r"of 256 tokens.*2e-04 allowed between torch.float32"):
        check(theirs)


@pytest.mark.parametrize(("room", "waves"), [(48, 3), (8, 16), (1, probe.WAVES)])
def test_enough_tokens_are_drawn_whatever_the_limit(policy, check, room, waves, drawn):
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

    check(policy, engine=FirstIsOff(), room=room)
    assert len(drawn) == 1 + waves
    assert sum(drawn[1:]) == waves * 2 * min(room, probe.LONGEST)


def test_what_is_no_number_counts():
    gap = torch.zeros(100)
    gap[3] = 20.0
    assert robust_mean(gap) == pytest.approx(0.01)
    for value in (torch.nan, torch.inf):
        gap[3] = value
        assert not robust_mean(gap) <= 0.05


def test_the_coarser_precision_and_the_device_decide():
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    assert tolerance(FP32, FP32, cpu) == tolerance(torch.float64, FP32, cpu) == 1e-4
    assert tolerance(FP32, FP32, cuda) == 5e-3
    assert tolerance(FP32, BF16, cpu) == tolerance(BF16, FP32, cuda) == 0.05
    assert tolerance(FP32, torch.float16, cuda) == 0.05
