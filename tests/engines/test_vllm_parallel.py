"""vLLM with its model split over two worker processes, against the one in this process."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines._vllm_args import engine_args
from lit_rlsched.engines.spec import EngineSpec, EngineStats
from lit_rlsched.engines.transformers import TransformersEngine
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling

PROMPT = [5, 14, 6, 18, 33]
LENGTH = 24
Drawn = dict[str, tuple[list[int], list[float]]]

has_workers = find_spec("vllm") is not None and len(os.sched_getaffinity(0)) > 1


def needs_workers(test: Callable) -> Callable:
    """Each start of them takes 15 seconds."""
    skip = pytest.mark.skipif(not has_workers, reason="needs vLLM and two cores")
    return pytest.mark.slow(skip(test))


def requests(count: int = 4, length: int = LENGTH) -> list[Request]:
    return [Request(f"r{i}", PROMPT, i, Sampling(length)) for i in range(count)]


def run(engine: VLLMEngine, batch: list[Request], steps: int = 1000) -> Drawn:
    drawn: Drawn = {request.id: ([], []) for request in batch}
    engine.submit(batch)
    for _ in range(steps):
        for event in (events := engine.step()):
            drawn[event.request_id][0].extend(event.token_ids)
            drawn[event.request_id][1].extend(event.logprobs)
        if not events:
            break
    return drawn


def check_same(drawn: Drawn, expected: Drawn) -> None:
    for name, (tokens, logprobs) in expected.items():
        assert drawn[name][0] == tokens
        assert drawn[name][1] == pytest.approx(logprobs, abs=1e-5)


def workers() -> set[psutil.Process]:
    """The processes that hold a part of a model."""
    return {p for p in psutil.Process().children(recursive=True) if "Worker_TP" in p.name()}


def check_ended(others: set[psutil.Process]) -> None:
    """No worker is left but those."""
    assert not psutil.wait_procs(workers() - others, timeout=20)[1]


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """What they have mapped of `/dev/shm`, its names taken away or not."""
    lines = [
        line for p in processes for line in Path(f"/proc/{p.pid}/maps").read_text().splitlines()
    ]
    paths = [line.split("/dev/shm/")[1] for line in lines if "/dev/shm/" in line]
    return {Path("/dev/shm", path.strip().removesuffix(" (deleted)")) for path in paths}


def check_gone(paths: set[Path]) -> None:
    """Nothing of it stays; the tracker that unlinks it may need a moment."""
    end = time.monotonic() + 60
    while left := {path for path in paths if path.exists()}:
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> str:
    """As `tiny_model`, tied embeddings and all, with two heads of keys and values to part."""
    config = AutoConfig.from_pretrained(tiny_model, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("two_heads")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def policy(model: str, make_policy: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return make_policy(model)


def spec(model: str) -> EngineSpec:
    return EngineSpec(model, 4, 128, ())  # nothing ends a completion but its limit


group = pytest.mark.xdist_group("split model")  # all in one worker of the tests: `both` starts once


@pytest.fixture(scope="module")
def both(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMEngine, VLLMEngine]]:
    """The whole model here, and the split one."""
    before = workers()
    state, threads, set_threads = (
        torch.get_rng_state(),
        torch.get_num_threads(),
        torch.set_num_threads,
    )
    variables = dict(os.environ)
    cache = 9 * 32 * 2 * 2 * 2 * 32 * 4 / 2**30  # 9 blocks of both heads, in each process
    split = VLLMEngine(tensor_parallel_size=2, kv_cache_gib=cache)
    split.start(spec(model))
    left = shared_memory(workers() - before)
    through_memory = hasattr(torch.ops._C, "init_shm_manager")  # not without AVX-512
    assert any("cpushm" in path.name for path in left) == through_memory
    assert split._meeting_place is not None and Path(split._meeting_place).exists()
    left.add(Path(split._meeting_place))
    assert not torch.distributed.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)
    changed = {k for k in {*variables, *os.environ} if variables.get(k) != os.environ.get(k)}
    assert not changed & {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD"}
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    whole = VLLMEngine(kv_cache_gib=cache)
    whole.start(spec(model))
    try:
        yield whole, split
        split.close()
        whole.close()
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total == 1, "the trainer's process group is still there"
    finally:
        split.close()
        whole.close()
        torch.distributed.destroy_process_group()
    check_ended(before)
    check_gone(left)


@pytest.fixture
def engines(
    both: tuple[VLLMEngine, VLLMEngine], policy: PreTrainedModel
) -> Iterator[tuple[VLLMEngine, VLLMEngine]]:
    """With the weights of the checkpoint, and empty."""
    for engine in both:
        engine.abort([f"r{i}" for i in range(4)])
        engine.sync_weights(policy.named_parameters(), 0)
    yield both


@group
@needs_workers
def test_the_split_model_draws_the_same(engines: tuple[VLLMEngine, VLLMEngine]) -> None:
    whole, split = engines
    state = torch.get_rng_state()
    check_same(run(split, requests()), run(whole, requests()))
    assert torch.equal(torch.get_rng_state(), state)
    a, b = whole.stats(), split.stats()
    assert (b.running, b.waiting, b.kv_tokens) == (0, 0, 0)
    assert (a.prefill_tokens, a.cached_tokens) == (b.prefill_tokens, b.cached_tokens)


@group
@needs_workers
def test_each_worker_holds_some_of_the_heads(engines: tuple[VLLMEngine, VLLMEngine]) -> None:
    whole, split = engines
    assert (whole.kv_capacity, split.kv_capacity) == (8 * 32, 17 * 32)


@group
@needs_workers
def test_a_small_cache_preempts_the_whole_model_only(
    engines: tuple[VLLMEngine, VLLMEngine],
) -> None:
    whole, split = engines
    before = whole.stats().preemptions, split.stats().preemptions
    check_same(run(split, requests(length=100)), run(whole, requests(length=100)))
    assert whole.stats().preemptions > before[0]
    assert split.stats().preemptions == before[1] == 0


@group
@needs_workers
def test_weights_reach_every_worker(
    engines: tuple[VLLMEngine, VLLMEngine], policy: PreTrainedModel
) -> None:
    whole, split = engines
    old = run(split, requests())
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.parameters():  # the tied head among them
                parameter *= 1.1
        for engine in engines:
            engine.sync_weights(policy.named_parameters(), version)
        new = run(split, requests())
        check_same(new, run(whole, requests()))
        tokens = torch.tensor([new["r3"][0]])
        with torch.no_grad():
            logits = policy(torch.cat([torch.tensor([PROMPT]), tokens], 1)).logits
        expected = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, tokens[0][:, None])[:, 0]
        assert new["r3"][1] == pytest.approx(expected.tolist(), abs=1e-4)
        assert new["r3"][1][:1] != pytest.approx(old["r3"][1][:1], abs=1e-3)


@group
@needs_workers
def test_what_pauses_or_is_aborted_goes_on_with_its_noise(
    engines: tuple[VLLMEngine, VLLMEngine],
) -> None:
    _, split = engines
    expected = run(split, requests())
    paused = run(split, [replace(r, pause_at=3 + i) for i, r in enumerate(requests())])
    assert [len(tokens) for tokens, _ in paused.values()] == [3, 4, 5, 6]
    going = [replace(r, prefix_ids=paused[r.id][0]) for r in requests()]
    parts = run(split, going[::-1], steps=5)
    aborted = split.abort(parts)
    assert {name: ([*p.token_ids], [*p.logprobs]) for name, p in aborted.items()} == parts
    going = [replace(r, prefix_ids=[*paused[r.id][0], *parts[r.id][0]]) for r in requests()]
    split.submit(going)
    split.abort(parts)  # nor does a moment inside the engine matter
    rest = run(split, going)
    together: Drawn = {}
    for name in expected:
        (a, x), (b, y), (c, z) = paused[name], parts[name], rest[name]
        together[name] = a + b + c, x + y + z
    check_same(together, expected)


@group
@needs_workers
def test_ctrl_c_is_the_trainers(engines: tuple[VLLMEngine, VLLMEngine]) -> None:
    _, split = engines
    expected = run(split, requests(1))
    for worker in workers():
        worker.send_signal(signal.SIGINT)  # as a terminal does
    check_same(run(split, requests(1)), expected)


@group
@needs_workers
def test_workers_see_only_what_they_should(engines: tuple[VLLMEngine, VLLMEngine]) -> None:
    def process(worker: object) -> tuple[str | None, int, bool, str]:
        import os
        import sys

        return (
            os.environ.get("RANK"),
            len(os.sched_getaffinity(0)),
            hasattr(sys.modules["__main__"], "__file__"),
            os.environ["OMP_NUM_THREADS"],
        )

    _, split = engines
    cores = len(os.sched_getaffinity(0))
    for rank, own, main, threads in split._live.collective_rpc(process):
        assert (rank, main) == (None, False), "no script of the user ran in it"
        assert own <= cores // 2 and int(threads) == cores // 2


@pytest.mark.usefixtures("forked_workers")
@needs_workers
def test_sizes_follow_each_other_and_a_dead_worker_is_an_error(
    model: str, policy: PreTrainedModel
) -> None:
    engine, drawn, mine = VLLMEngine(), [], workers()
    for size in (1, 2, 1):
        engine.tensor_parallel_size = size
        engine.start(spec(model))
        assert engine.stats() == EngineStats(0, 0, 0), "it counts anew"
        engine.sync_weights(policy.named_parameters(), 1)
        drawn.append(run(engine, requests(length=8)))
        if size == 2:
            _, one = workers() - mine
            engine.submit(requests())
            one.kill()
            with pytest.raises(RuntimeError, match=r"worker process.*size=2\).* has died"):
                for _ in range(LENGTH):
                    engine.step()
        engine.close()
        check_ended(mine)
    for other in drawn[1:]:
        check_same(other, drawn[0])


@pytest.mark.usefixtures("forked_workers")
@needs_workers
def test_a_refused_start_leaves_no_worker(model: str) -> None:
    mine = workers()
    with pytest.raises(UsageError, match="raise that budget"):
        VLLMEngine(tensor_parallel_size=2).start(
            replace(spec(model), kv_cache_bytes=32 * 2 * 2 * 2 * 32 * 4)
        )
    check_ended(mine)


# --- without vLLM


def test_how_far_a_model_can_be_split(model: str, tiny_model: str) -> None:
    most = VLLMEngine().max_tensor_parallel_size(spec(model))
    assert most == min(2, len(os.sched_getaffinity(0))), "it has two attention heads"
    assert TransformersEngine().max_tensor_parallel_size(spec(model)) == 1


@pytest.mark.parametrize(
    ("cores", "count", "bound"),
    [([0, 1], 2, "0|1"), ([2, 3, 5, 7, 9], 2, "2,3|5,7"), ([1, 2, 3, 4], 4, "1|2|3|4")],
    ids=["two", "five", "four"],
)
def test_workers_share_the_cores(cores: list[int], count: int, bound: str) -> None:
    assert guest.bind_threads(cores, count) == bound


@pytest.mark.parametrize(
    ("fixture", "size", "bytes_"), [("model", 2, 500), ("tiny_model", 2, 1000), ("model", 1, 1000)]
)
def test_a_budget_counts_each_token_once(
    request: pytest.FixtureRequest, fixture: str, size: int, bytes_: int
) -> None:
    """What a worker gets of it: a head of keys and values is not split."""
    small = replace(spec(request.getfixturevalue(fixture)), kv_cache_bytes=1000)
    args = engine_args(VLLMEngine(tensor_parallel_size=size), small)
    assert args["kv_cache_memory_bytes"] == bytes_
