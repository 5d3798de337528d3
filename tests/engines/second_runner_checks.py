"""Checks of vLLM's second model runner with draft tokens, which `test_vllm_verifying_v2.py` runs.

`pytest -p second_runner tests/engines/second_runner_checks.py` runs them alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from told_drafter import ToldDrafter

from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines import _vllm_args as arguments
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.types import Request, Sampling, stable_hash

pytestmark = pytest.mark.usefixtures("all_guesses")

TOKENS = 3
STEP = 24
"""Tokens of a step: longer prompts are computed in parts."""
SHORT, LONG = 5, 37
LIMIT = 30
SAMPLING: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 4, "temperature": 1.3},
    {"top_p": 0.7},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.8},
    {"temperature": 2.0},
]


@dataclass
class Watch:
    """Compares what each step says with vLLM's own functions and with its scheduler.

    Args:
        engine: The engine.
    """

    engine: VLLMEngine
    kept: list[int] = field(default_factory=list)
    """Tokens of each request and step with draft tokens."""
    beside: int = 0
    """Requests in such steps whose prompt was computed in part."""

    resumed: int = 0
    """Requests with draft tokens whose last token is computed as the end of a prompt."""

    def __post_init__(self) -> None:
        ((self.runner),) = self.engine._live.collective_rpc(lambda worker: worker.model_runner)
        self._sample = self.runner.sample
        self.runner.sample = self.sample

    def sample(self, hidden_states: Any, batch: Any, grammar: Any) -> Any:
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

        output, sampled, rejected = self._sample(hidden_states, batch, grammar)
        assert output.num_sampled is sampled
        assert output.num_rejected is rejected
        if batch.num_draft_tokens:
            read = batch.input_ids[batch.logits_indices].tolist()
            drawn = output.logprobs_tensors.logprob_token_ids[:, 0].tolist()
            bounds = batch.cu_num_logits.tolist()
            assert bounds == output.logprobs_tensors.cu_num_generated_tokens
            kept = []
            for start, end in pairwise(bounds):
                right = 0
                while start + right + 1 < end and drawn[start + right] == read[start + right + 1]:
                    right += 1
                kept.append(1 + right)
                row = output.sampled_token_ids[len(kept) - 1].tolist()
                assert row[: 1 + right] == drawn[start : start + 1 + right]
            states = self.runner.req_states
            expected = get_num_sampled_and_rejected(
                torch.tensor(kept, dtype=torch.int32),
                batch.seq_lens,
                batch.cu_num_logits,
                batch.idx_mapping,
                states.prefill_len.gpu,
            )
            assert torch.equal(sampled, expected[0])
            assert torch.equal(rejected, expected[1])
            assert sampled.dtype == rejected.dtype == torch.int32
            self.kept += kept
            self.beside += sampled.tolist().count(0)
            self.resumed += int(batch.is_prefilling_np[batch.num_draft_tokens_per_req > 0].sum())
        return output, sampled, rejected

    def step(self) -> None:
        """Compare the states beside the model with those of the scheduler."""
        states = self.runner.req_states
        assert self.runner.decode_query_len == 1
        for request in self.engine._scheduler.running:
            at = states.req_id_to_index[request.request_id]
            assert int(states.num_computed_tokens.gpu[at]) == request.num_computed_tokens
            assert int(states.total_len.gpu[at]) == request.num_tokens
            tokens = states.all_token_ids.gpu[at, : request.num_tokens].tolist()
            assert tokens == [*request.all_token_ids]
            if request.num_computed_tokens >= int(states.prefill_len.np[at]):
                assert int(states.last_sampled_tokens[at]) == tokens[-1]


def start(engine: VLLMEngine, model: str, drafting: Drafting | None) -> VLLMEngine:
    with pytest.MonkeyPatch.context() as patch:
        plain = arguments.engine_args
        chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": STEP}
        patch.setattr(arguments, "engine_args", lambda *of: plain(*of) | chunked)
        engine.start(EngineSpec(model, 6, 96, (1, 30), drafting=drafting))
    return engine


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> Iterator[VLLMEngine]:
    engine = VLLMEngine()
    try:
        yield start(engine, tiny_model, None)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def drafting(tiny_model: str) -> Iterator[VLLMEngine]:
    engine = VLLMEngine()
    try:
        yield start(engine, tiny_model, Drafting(TOKENS, 64, "told_drafter.ToldDrafter"))
    finally:
        engine.close()


def requests(count: int = 6) -> list[Request]:
    """One by each rule of sampling; every second prompt is too long for a step."""
    return [
        Request(
            f"g{i}/0",
            [4 + stable_hash(i, j) % 60 for j in range(LONG if i % 2 else SHORT)],
            100 + i,
            Sampling(max_completion_length=LIMIT, **rules),  # type: ignore[arg-type]
        )
        for i, rules in enumerate(SAMPLING[:count])
    ]


Drawn = dict[str, tuple[list[int], list[float]]]


def run(engine: VLLMEngine, batch: Sequence[Request], watch: Watch | None = None) -> Drawn:
    drawn: Drawn = {request.id: ([], []) for request in batch}
    engine.submit(batch)
    while engine._held:
        for event in engine.step():
            tokens, logprobs = drawn[event.request_id]
            tokens += event.token_ids
            logprobs += event.logprobs
        if watch is not None:
            watch.step()
    return drawn


def same(drawn: Drawn, expected: Drawn) -> None:
    for name, (tokens, logprobs) in expected.items():
        assert drawn[name][0] == tokens
        assert drawn[name][1] == pytest.approx(logprobs, abs=1e-5)


@pytest.fixture(scope="module")
def expected(plain: VLLMEngine) -> Drawn:
    return run(plain, requests())


@pytest.fixture(scope="module")
def watch(drafting: VLLMEngine) -> Watch:
    return Watch(drafting)


def test_it_is_the_runner_of_gpus(drafting: VLLMEngine, watch: Watch) -> None:
    from vllm.v1.worker.gpu.input_batch import _expand_idx_mapping_kernel
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    assert isinstance(watch.runner, GPUModelRunner)
    assert type(watch.runner.sampler) is Sampler
    assert type(_expand_idx_mapping_kernel).__name__ == "InterpretedFunction"
    assert watch.runner.req_states.draft_tokens.shape == (6, TOKENS)
    assert drafting._noise._by_position


@pytest.mark.parametrize("mode", ["right", "mixed", "junk", "nothing"])
def test_the_same_is_drawn(drafting: VLLMEngine, watch: Watch, expected: Drawn, mode: str) -> None:
    batch = requests()
    ToldDrafter.mode = mode
    ToldDrafter.tell([r.prompt_ids for r in batch], [expected[r.id][0] for r in batch])
    drafting._live.reset_prefix_cache()  # so that long prompts take several steps again
    watch.kept, watch.beside, before = [], 0, drafting.stats()
    same(run(drafting, batch, watch), expected)
    after = drafting.stats()
    proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
    assert after.drafter_failures == 0
    if mode == "nothing":
        assert proposed == 0
        return
    assert proposed > 50
    assert watch.beside > 0, "prompts were computed in parts beside draft tokens"
    assert {*watch.kept} == ({1} if mode == "junk" else {*range(1, 2 + TOKENS)})
    assert (accepted == 0) is (mode == "junk")


def test_a_pause_changes_nothing(drafting: VLLMEngine, watch: Watch, expected: Drawn) -> None:
    batch = requests(4)
    ToldDrafter.mode = "mixed"
    ToldDrafter.tell([r.prompt_ids for r in batch], [expected[r.id][0] for r in batch])
    for at in (1, 2, TOKENS, TOKENS + 1, 2 * TOKENS + 1):
        drawn = run(drafting, [replace(request, pause_at=at) for request in batch], watch)
        back = [replace(r, prefix_ids=tuple(drawn[r.id][0])) for r in batch]
        assert {len(tokens) for tokens, _ in drawn.values()} == {at}
        for name, (tokens, logprobs) in run(drafting, back, watch).items():
            drawn[name] = drawn[name][0] + tokens, drawn[name][1] + logprobs
        same(drawn, {r.id: expected[r.id] for r in batch})


def test_preemptions_change_nothing(tiny_model: str, expected: Drawn) -> None:
    settings = Drafting(TOKENS, 64, "told_drafter.ToldDrafter")
    engine = VLLMEngine(engine_kwargs={"num_gpu_blocks_override": 6})
    try:
        watch = Watch(start(engine, tiny_model, settings))
        batch = requests()
        ToldDrafter.mode = "mixed"
        ToldDrafter.tell([r.prompt_ids for r in batch], [expected[r.id][0] for r in batch])
        for step in (12, STEP):  # with the first, a part of a prompt ends before its last token
            engine._scheduler.max_num_scheduled_tokens = step
            same(run(engine, batch, watch), expected)
        assert engine.stats().preemptions > 1
        assert watch.resumed > 0
    finally:
        engine.close()
