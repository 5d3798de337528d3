"""vLLM with draft tokens draws what it draws without: tokens, log-probs, noise and cache."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from sampled_groups import PROMPTS, plan
from told_drafter import ToldDrafter

from lit_rlsched.engines import ProcessEngine, VLLMEngine
from lit_rlsched.engines import _vllm_verifying as drafting
from lit_rlsched.engines._vllm_args import engine_args
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.speculation import Drafting, DraftTokens
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import adapter_spec, named_adapters
from lit_rlsched.types import Completion, Request, Sampling, stable_hash

pytestmark = pytest.mark.usefixtures("all_guesses")

ENDS = (1, 30)
"""Tokens that end a completion; the model draws each about once in 60 tokens."""
TOKENS = 4
LIMIT = 40
MAX_MODEL_LEN = 96
TOLD = Drafting(TOKENS, 64, "told_drafter.ToldDrafter")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@dataclass
class Drawn:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    events: list[int] = field(default_factory=list)
    """Tokens of each event."""


class Both(NamedTuple):
    plain: VLLMEngine
    drafting: VLLMEngine

    def check(self, batch: list[Request], mode: str) -> dict[str, Drawn]:
        """Draw a batch with both; returns what was drawn with draft tokens."""
        expected = run(self.plain, batch)
        tell(batch, expected, mode)
        drawn = run(self.drafting, batch)
        check_same(drawn, expected)
        return drawn

    @property
    def proposed(self) -> int:
        """Draft tokens so far."""
        stats = self.drafting.stats()
        assert stats.drafter_failures == 0
        return stats.proposed


def spec(model: str, **other: object) -> EngineSpec:
    return EngineSpec(model, 12, MAX_MODEL_LEN, ENDS, **other)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def both(tiny_model: str) -> Iterator[Both]:
    engines = Both(VLLMEngine(), VLLMEngine())
    try:
        for engine, settings in zip(engines, (None, TOLD), strict=True):
            engine.start(spec(tiny_model, drafting=settings))
        yield engines
        for engine in engines:
            stats = engine.stats()
            assert stats.running == stats.waiting == stats.kv_tokens == 0
    finally:
        for engine in engines:
            engine.close()


def requests(count: int = 12, **sampling: float) -> list[Request]:
    """Groups of four; `count` of them may decode at once."""
    rules = Sampling(**{"max_completion_length": LIMIT, **sampling})  # type: ignore[arg-type]

    def prompt(group: int) -> list[int]:
        return [4 + stable_hash(group, i) % 60 for i in range(5 + 15 * group)]

    return [Request(f"g{i // 4}/{i % 4}", prompt(i // 4), 100 + i, rules) for i in range(count)]


def run(engine: VLLMEngine, batch: Sequence[Request], steps: int = 1000) -> dict[str, Drawn]:
    drawn = {request.id: Drawn() for request in batch}
    engine.submit(batch)
    while engine._held and steps:
        steps -= 1
        for event in engine.step():
            one = drawn[event.request_id]
            assert len(event.token_ids) == len(event.logprobs) > 0
            one.token_ids += event.token_ids
            one.logprobs += event.logprobs
            one.events.append(len(event.token_ids))
            one.finish_reason = event.finish_reason
    return drawn


def go_on(drawn: dict[str, Drawn], rest: dict[str, Drawn]) -> None:
    for name, more in rest.items():
        drawn[name].token_ids += more.token_ids
        drawn[name].logprobs += more.logprobs
        drawn[name].finish_reason = more.finish_reason


def tell(batch: list[Request], drawn: dict[str, Drawn], mode: str) -> None:
    ToldDrafter.mode = mode
    ToldDrafter.tell([r.prompt_ids for r in batch], [drawn[r.id].token_ids for r in batch])


def check_same(drawn: dict[str, Drawn], expected: dict[str, Drawn]) -> None:
    """Not even rounding differs here: vLLM's CPU kernels compute a row alike in any company."""
    for name, one in expected.items():
        assert drawn[name].token_ids == one.token_ids
        assert drawn[name].logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert drawn[name].finish_reason == one.finish_reason


@needs_vllm
@pytest.mark.parametrize("mode", ["right", "mixed", "junk"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3},
        {"temperature": 0.0},
    ],
    ids=["plain", "temperature", "top_k", "top_p", "all", "greedy"],
)
def test_the_same_is_drawn(both: Both, mode: str, sampling: dict[str, float]) -> None:
    proposed = both.proposed
    drawn = both.check(requests(**sampling), mode)
    assert both.proposed - proposed > 100
    longest = max(len(one.events) for one in drawn.values())
    assert longest < LIMIT / 2 if mode == "right" else longest <= LIMIT


@needs_vllm
def test_greedy_requests_beside_others(both: Both) -> None:
    batch = [
        replace(r, sampling=replace(r.sampling, temperature=float(i % 2)))
        for i, r in enumerate(requests())
    ]
    both.check(batch, "mixed")


@needs_vllm
def test_an_end_inside_the_draft_tokens(both: Both) -> None:
    drawn = both.check(requests(), "right")
    stopped = [one for one in drawn.values() if one.finish_reason == "stop"]
    assert any(1 < one.events[-1] < 1 + TOKENS for one in stopped)
    assert all(one.token_ids[-1] in ENDS for one in stopped)
    assert not any({*ENDS} & {*one.token_ids[:-1]} for one in drawn.values())


@needs_vllm
@pytest.mark.parametrize("mode", ["right", "mixed"])
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 17])
def test_the_limit_is_kept(both: Both, mode: str, limit: int) -> None:
    drawn = both.check(requests(max_completion_length=limit), mode)
    assert max(len(one.token_ids) for one in drawn.values()) == limit


@needs_vllm
@pytest.mark.parametrize("mode", ["right", "mixed"])
def test_the_end_of_the_context_is_reached_beside_short_texts(both: Both, mode: str) -> None:
    short, *_, last = requests(count=9, max_completion_length=13, temperature=2.0)
    prompt = [4 + stable_hash(i) % 60 for i in range(MAX_MODEL_LEN - 13)]
    batch = [replace(last, prompt_ids=prompt, seed=seed, id=f"l/{seed}") for seed in range(6)]
    drawn = both.check([short, *batch], mode)
    assert any(len(one.token_ids) == 13 for name, one in drawn.items() if name != short.id)


@needs_vllm
@pytest.mark.parametrize("mode", ["right", "mixed"])
def test_a_pause_at_any_position_changes_nothing(both: Both, mode: str) -> None:
    batch = requests()
    expected = run(both.plain, batch)
    tell(batch, expected, mode)
    for at in range(1, 2 * TOKENS + 2):
        drawn = run(both.drafting, [replace(request, pause_at=at) for request in batch])
        paused = [r for r in batch if drawn[r.id].finish_reason == "length"]
        assert {len(drawn[r.id].token_ids) for r in paused} == {at}
        back = [replace(r, prefix_ids=tuple(drawn[r.id].token_ids)) for r in paused]
        go_on(drawn, run(both.drafting, back[::-1]))
        check_same(drawn, expected)


@needs_vllm
def test_an_abort_after_any_step_changes_nothing(both: Both) -> None:
    batch = requests()
    expected = run(both.plain, batch)
    tell(batch, expected, "mixed")
    for steps in range(1, 6):
        drawn = run(both.drafting, batch, steps)
        partial = both.drafting.abort([request.id for request in batch])
        for name, part in partial.items():
            assert [*part.token_ids] == drawn[name].token_ids
        back = [
            replace(r, prefix_ids=tuple(partial[r.id].token_ids)) for r in batch if r.id in partial
        ]
        go_on(drawn, run(both.drafting, back))
        check_same(drawn, expected)


@needs_vllm
def test_generators_stand_where_they_would_stand_without(both: Both) -> None:
    batch = [replace(request, pause_at=11) for request in requests()]
    both.check(batch, "mixed")
    kept: list[list[torch.Tensor]] = []
    for engine in both:
        ((beside),) = engine._live.collective_rpc(lambda worker: worker.model_runner.kept_noise)
        keys = [engine._noise._kept[r.id][2] for r in batch if r.id in engine._noise._kept]
        kept.append([beside.generators[key].get_state() for key in keys])
        engine.submit(batch)  # with new noise
        engine.abort([request.id for request in batch])
    assert len(kept[0]) > 4
    assert all(map(torch.equal, *kept))


@needs_vllm
def test_the_prefix_cache_holds_what_it_would_hold_without(both: Both) -> None:
    batch = requests(count=4)
    first, expected = run(both.plain, batch), []
    tell(batch, first, "junk")
    for engine in both:
        run(engine, batch)
        before = engine.stats()
        again = [
            replace(r, id=f"{r.id}+", prompt_ids=[*r.prompt_ids, *first[r.id].token_ids])
            for r in batch
        ]
        ToldDrafter.mode = "nothing"
        run(engine, again)
        ToldDrafter.mode = "junk"
        after = engine.stats()
        cached = after.cached_tokens - before.cached_tokens
        expected.append((cached, after.prefill_tokens - before.prefill_tokens))
    assert expected[0] == expected[1]
    assert expected[0][0] > 0


@needs_vllm
def test_more_requests_than_the_threshold_get_none(tiny_model: str) -> None:
    engine = VLLMEngine()
    engine.start(spec(tiny_model, drafting=Drafting(tokens=3, while_running=4)))
    try:
        greedy = requests(temperature=0.0)  # those of a group draw the same
        engine.submit([replace(r, pause_at=10 if i % 3 else None) for i, r in enumerate(greedy)])
        while engine._held:
            running = len(engine._held)
            events = engine.step()
            assert running <= 4 or all(len(event.token_ids) == 1 for event in events)
        stats = engine.stats()
        assert 0 < stats.accepted <= stats.proposed
    finally:
        engine.close()


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["right", "mixed", "junk"])
def test_preemptions_change_nothing(both: Both, tiny_model: str, mode: str) -> None:
    engine = VLLMEngine(engine_kwargs={"num_gpu_blocks_override": 16})
    engine.start(spec(tiny_model, drafting=TOLD))
    try:
        batch = requests()
        expected = run(both.plain, batch)
        tell(batch, expected, mode)
        check_same(run(engine, batch), expected)
        assert engine.stats().preemptions > 0
    finally:
        engine.close()


@needs_vllm
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.usefixtures("forked_workers")
def test_a_split_model_draws_the_same(both: Both, tiny_model: str) -> None:
    """Texts and draft tokens are in this process; each worker verifies them."""
    engine = VLLMEngine(tensor_parallel_size=2)
    engine.start(spec(tiny_model, drafting=TOLD))
    try:
        batch = requests()
        expected = run(both.plain, batch)
        for mode in ("right", "mixed"):
            tell(batch, expected, mode)
            drawn = run(engine, [replace(request, pause_at=7) for request in batch])
            paused = [r for r in batch if drawn[r.id].finish_reason == "length"]
            back = [replace(r, prefix_ids=tuple(drawn[r.id].token_ids)) for r in paused]
            go_on(drawn, run(engine, back))
            check_same(drawn, expected)
    finally:
        engine.close()


def rollout(engine: RolloutEngine, of: EngineSpec) -> tuple[list[Completion], int]:
    """Completions of a round, and how many of their tokens were draft tokens."""
    engine.start(of)
    try:
        worker = engine.make_worker(Admission(12 // len(engine.engines)))
        worker.start_trace()
        groups = [replace(group, sampling=Sampling(60, temperature=0.1)) for group in plan(60)]
        controller = RolloutController(worker, Unscored(), seed=1)  # type: ignore[arg-type]
        list(controller.run(groups, FullRound(PROMPTS), 0))
        accepted = engine.each(lambda one: one.stats().accepted)
        return [c for group in groups for c in group.completions], sum(accepted)
    finally:
        engine.close()


@needs_vllm
@pytest.mark.slow
def test_engines_in_other_processes_draw_the_same(
    tiny_model: str, placement: type[ProcessEngine]
) -> None:
    """They run ahead, and draft from the texts that they have drawn."""
    pool = EnginePool([placement(VLLMEngine()) for _ in range(2)])
    drawn, accepted = rollout(pool, spec(tiny_model, drafting=Drafting(4, 12)))
    expected, none = rollout(VLLMEngine(), spec(tiny_model))
    assert [c.token_ids for c in drawn] == [c.token_ids for c in expected]
    for one_of, other in zip(drawn, expected, strict=True):
        assert one_of.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert accepted > 50 > none == 0


@needs_vllm
@pytest.mark.slow
def test_half_precision(tiny_model: str) -> None:
    """A step of several positions rounds otherwise, as a step of more rows does."""
    engines = Both(VLLMEngine(dtype="bfloat16"), VLLMEngine(dtype="bfloat16"))
    try:
        for engine, settings in zip(engines, (None, TOLD), strict=True):
            engine.start(spec(tiny_model, drafting=settings))
        batch = requests()
        for mode in ("right", "mixed"):
            expected = run(engines.plain, batch)
            tell(batch, expected, mode)
            drawn = run(engines.drafting, batch)
            for name, one in expected.items():
                assert drawn[name].token_ids == one.token_ids
                assert drawn[name].logprobs == pytest.approx(one.logprobs, abs=0.1)
    finally:
        for engine in engines:
            engine.close()


@needs_vllm
@pytest.mark.slow
def test_adapters(tiny_model: str) -> None:
    """Draft tokens are drawn with the adapters of the last sync, and with no others."""
    from lora_policy import with_lora  # skips the test without peft

    policies = [with_lora(tiny_model, seed=seed) for seed in range(2)]
    engines = Both(VLLMEngine(enable_lora=True), VLLMEngine(enable_lora=True))
    drawn = []
    try:
        for engine, settings in zip(engines, (None, TOLD), strict=True):
            engine.start(spec(tiny_model, drafting=settings, adapters=adapter_spec(policies[0])))
        for version, policy in enumerate(policies, 1):
            for engine in engines:
                engine.sync_weights(named_adapters(policy), version)
            drawn += [engines.check(requests(), mode) for mode in ("right", "mixed")]
        assert engines.proposed > 200
    finally:
        for engine in engines:
            engine.close()
    assert drawn[0] != drawn[2]


@needs_vllm
def test_min_p_is_refused_by_name(both: Both) -> None:
    with pytest.raises(UsageError, match=r"request 'g0/0' has min_p=0.1.*`Speculation`"):
        both.drafting.submit(requests(count=2, min_p=0.1))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_draft_tokens_take_no_place_of_a_prefill(tiny_model: str, device: str) -> None:
    of = spec(tiny_model, device=torch.device(device))
    plain, drafted = (
        engine_args(VLLMEngine(), replace(of, drafting=settings))
        for settings in (None, Drafting(tokens=5, while_running=64))
    )
    assert drafted.pop("max_num_batched_tokens") == plain.pop("max_num_batched_tokens") + 12 * 5
    assert drafted == plain


def test_a_preempted_request_gets_no_draft_tokens() -> None:
    """It would keep them, and use them later, when they may reach past its pause."""
    drafts = DraftTokens(Drafting(tokens=2))
    inside = {}
    for name, computed in (("g/0", 6), ("g/1", 0)):
        request = Request(name, [4, 5, 6], 0, Sampling(40))
        inside[name] = SimpleNamespace(
            request=request,
            token_ids=[],
            num_computed_tokens=computed,
            num_tokens=7,
            spec_token_ids=[],
            inside=name,
        )
        output = SimpleNamespace(request_id=name, new_token_ids=[7, 4, 5, 6])
        drafting.take(drafts, [output], inside)  # type: ignore[arg-type]
    scheduler = SimpleNamespace(requests=inside)
    drafting.give(scheduler, drafts, inside)  # type: ignore[arg-type]
    assert inside["g/0"].spec_token_ids == [7, 4]
    assert inside["g/1"].spec_token_ids == []


def test_recurrent_layers_are_refused_by_name() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_hybrid=True))
    with pytest.raises(UsageError, match="model 'somewhere': its recurrent layers"):
        drafting.begin(None, spec("somewhere", drafting=TOLD), config)
    assert drafting.begin(None, spec("somewhere"), config) is None
