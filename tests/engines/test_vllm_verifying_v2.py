"""How draft tokens are verified beside vLLM's second model runner, the one of GPUs.

`test_it_draws_the_same` runs that runner itself, on the CPU (`tests/second_runner.py`). The others
see what is put into it, with stand-ins for the rest.
"""

import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_build import REASON, for_cpu

from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines import _vllm_second_runner as second
from lit_rlsched.engines import _vllm_verifying as drafting
from lit_rlsched.engines import _vllm_verifying as first
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.settings import UsageError

ROOT = Path(__file__).parents[2]
TOKENS = 3
# half precision and adapters take minutes: docs/howto/gpu.md has the command
SELECTED = [
    "second_runner_checks.py",
    "test_vllm_draft_tokens.py::test_an_end_inside_the_draft_tokens",
    "test_vllm_draft_tokens.py::test_the_end_of_the_context_is_reached_beside_short_texts",
    "test_vllm_draft_tokens.py::test_the_prefix_cache_holds_what_it_would_hold_without",
    "test_vllm_draft_tokens.py::test_more_requests_than_the_threshold_get_none",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None or not for_cpu(), reason=REASON)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_it_draws_the_same() -> None:
    """vLLM's second runner with its Triton kernels, in a process that has Triton's interpreter."""
    tests = [f"tests/engines/{name}" for name in SELECTED]
    options = ["-p", "second_runner", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    shown = ["--tb=short", "--show-capture=no", "--durations=0", "-rs"]
    inside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *shown, *tests],
        cwd=ROOT,
        env=inside | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


# What is kept


def by_hand(drawn: list[list[int]], drafts: list[list[int]]) -> list[int]:
    right = []
    for tokens, draft in zip(drawn, drafts, strict=True):
        pairs = [a == b for a, b in zip(tokens, draft, strict=False)]
        right.append(pairs.index(False) if False in pairs else len(pairs))
    return right


def rows(drafts: list[list[int]], vocabulary: int = 3) -> tuple[list[list[int]], Tensor, Tensor]:
    """Draws in rows of logits, tokens read there, and where requests begin."""
    drawn = [torch.randint(vocabulary, (1 + len(draft),)).tolist() for draft in drafts]
    read = [[vocabulary, *draft] for draft in drafts]
    starts = torch.tensor([0, *(1 + len(draft) for draft in drafts)]).cumsum(0).int()
    return drawn, torch.tensor([token for each in read for token in each]).int(), starts


def test_draws_are_kept_up_to_the_first_that_is_not_the_draft_token() -> None:
    seen = set()
    for _ in range(200):
        drafts = [torch.randint(3, (int(n),)).tolist() for n in torch.randint(1 + TOKENS, (5,))]
        drawn, read, starts = rows(drafts)
        flat = torch.tensor([token for each in drawn for token in each])
        most = max(map(len, drafts))
        tokens, right = second.agreeing(flat, read, starts, most)
        assert right.dtype == torch.int32
        assert right.tolist() == by_hand(drawn, drafts)
        assert tokens.shape == (5, 1 + most)
        for row, whole, kept in zip(tokens.tolist(), drawn, right.tolist(), strict=True):
            assert row[: 1 + kept] == whole[: 1 + kept]
        seen |= {(len(d), r) for d, r in zip(drafts, right.tolist(), strict=True)}
    assert seen == {(n, r) for n in range(1 + TOKENS) for r in range(1 + n)}


def test_a_step_without_draft_tokens_is_left_alone() -> None:
    drawn = object(), torch.tensor([1]), torch.tensor([0])
    batch = SimpleNamespace(num_draft_tokens=0)
    kept = second.sample(lambda *_: drawn, torch.zeros(1), batch, None)
    assert all(map(operator.is_, kept, drawn))


def test_counts_are_those_of_the_rows_that_are_kept() -> None:
    """Requests with 2, no and 1 draft tokens, and one whose prompt is computed in part."""
    batch = SimpleNamespace(
        num_draft_tokens=3,
        num_draft_tokens_per_req=torch.tensor([2, 0, 1, 0]).numpy(),
        input_ids=torch.tensor([6, 1, 2, 6, 6, 3, 4, 4, 4]),
        logits_indices=torch.tensor([0, 1, 2, 3, 4, 5, 8]),
        cu_num_logits=torch.tensor([0, 3, 4, 6, 7]),
    )
    output = SimpleNamespace(sampled_token_ids=torch.tensor([1, 9, 5, 7, 3, 8, 4])[:, None])
    of_vllm = output, torch.tensor([1, 1, 1, 0]), torch.tensor([2, 0, 1, 0])
    kept = second.sample(lambda *_: of_vllm, torch.zeros(1), batch, None)
    assert kept == (output, output.num_sampled, output.num_rejected)
    assert output.num_sampled.tolist() == [2, 1, 2, 0]
    assert output.num_rejected.tolist() == [1, 0, 0, 0]
    rows = output.sampled_token_ids.tolist()
    assert (rows[0][:2], rows[1][:1], rows[2][:2]) == ([1, 9], [7], [3, 8])


# What a step is prepared with


class Runner:
    """vLLM's, as far as it is touched."""

    device = torch.device("cpu")
    rejection_sampler = None
    decode_query_len = 1

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            draft_tokens=torch.zeros(4, 0, dtype=torch.int64),
            req_id_to_index={"a": 2, "b": 0, "c": 3},
        )
        self.seen: list[tuple[Any, ...]] = []

    def prepare_inputs(self, scheduled: Any, *more: str) -> str:
        self.seen.append((self.decode_query_len, self.req_states.draft_tokens.tolist(), more))
        if "fail" in more:
            raise RuntimeError
        return "prepared"

    def sample(self, *_: Any) -> None: ...


@pytest.fixture
def runner() -> Runner:
    made = Runner()
    second.install(SimpleNamespace(model_runner=made), TOKENS)
    return made


def scheduled(**drafts: list[int]) -> SimpleNamespace:
    return SimpleNamespace(scheduled_spec_decode_tokens=drafts)


def test_draft_tokens_are_where_the_runner_reads_them(runner: Runner) -> None:
    prepare: Any = runner.prepare_inputs
    assert prepare(scheduled(c=[7, 8, 9], b=[5]), "state", "graph") == "prepared"
    assert prepare(scheduled(), "state") == "prepared"
    (most, table, more), (usual, *_) = runner.seen
    assert table == [[5, 0, 0], [0, 0, 0], [0, 0, 0], [7, 8, 9]]
    assert (most, usual, more) == (1 + TOKENS, 1, ("state", "graph"))
    assert runner.req_states.draft_tokens.dtype == torch.int64


def test_a_step_that_fails_leaves_the_runner_as_it_was(runner: Runner) -> None:
    with pytest.raises(RuntimeError):
        runner.prepare_inputs(scheduled(a=[1]), "fail")
    assert runner.decode_query_len == 1


# What is refused


def config(by_position: bool) -> SimpleNamespace:
    model = SimpleNamespace(is_hybrid=False, get_vocab_size=lambda: 9)
    return SimpleNamespace(model_config=model, use_v2_model_runner=by_position)


@pytest.mark.parametrize(
    ("device", "by_position", "installed"),
    [
        ("cpu", False, first.install),
        ("cpu", True, second.install),
        ("cuda:0", True, second.install),
    ],
)
def test_each_runner_gets_its_own(device: str, by_position: bool, installed: Any) -> None:
    called = []
    engine = SimpleNamespace(collective_rpc=lambda method, args=(): called.append((method, args)))
    settings = Drafting(TOKENS, 8)
    of = EngineSpec("m", 4, 64, (1,), device=torch.device(device), drafting=settings)
    drafts = drafting.begin(engine, of, config(by_position))
    assert drafts is not None and drafts.settings is settings
    assert called == [(installed, (TOKENS,) if by_position else ())]


def test_the_first_runner_is_refused_on_a_gpu() -> None:
    of = EngineSpec("m", 4, 64, (1,), device=torch.device("cuda", 0), drafting=Drafting())
    with pytest.raises(UsageError, match=r"`cuda:0`: vLLM runs its first.*VLLM_USE_V2_MODEL_RUN"):
        drafting.begin(None, of, config(False))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, "something", name) for name in second.WITHOUT),
        ("decode_query_len", 4, "decode_query_len=4"),
    ],
)
def test_a_runner_that_draws_in_its_own_way_is_refused(name: str, value: Any, said: str) -> None:
    made = Runner()
    setattr(made, name, value)
    with pytest.raises(UsageError, match=f"`Speculation` with.*way of its own.*{said}"):
        second.install(SimpleNamespace(model_runner=made), TOKENS)
    assert made.req_states.draft_tokens.shape == (4, 0)


# CUDA graphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's module of CUDA graphs."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    guest.import_vllm()
    module: Any = import_module("vllm.v1.worker.gpu.cudagraph_utils")
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(module, "get_pp_group", lambda: group)
    monkeypatch.setattr(module, "is_breakable_cudagraph_enabled", lambda: False)
    monkeypatch.setattr(
        module, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
    )
    yield module


@pytest.mark.parametrize(
    ("mode", "verified"),
    [("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL_DECODE_ONLY", "NONE"), ("PIECEWISE", "PIECEWISE")],
)
@pytest.mark.parametrize("lengths", [[4, 4], [4, 1], [2, 2, 2, 1]])
def test_no_graph_of_a_decode_step_takes_draft_tokens(
    graphs: Any, mode: str, verified: str, lengths: list[int]
) -> None:
    """Its graphs are made for one token per request; the manager is vLLM's, with no graph in it."""
    modes = graphs.CUDAGraphMode
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=[1, 2, 4, 8, 16], max_cudagraph_capture_size=16
    )
    manager = graphs.CudaGraphManager(
        SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            compilation_config=compilation,
            speculative_config=None,
        ),
        torch.device("cpu"),
        modes[mode],
        decode_query_len=1,
    )
    manager._graphs_captured = True
    uniform = import_module("vllm.v1.worker.utils").get_uniform_decode_token_count

    def chosen(lengths: list[int]) -> str:
        count, tokens, most = len(lengths), sum(lengths), max(lengths)
        same = uniform(count, tokens, most, True)
        return str(manager.dispatch(count, tokens, same, 0, max_query_len=most).cg_mode.name)

    assert chosen(lengths) == verified
    assert chosen([1] * len(lengths)) == ("FULL" if "FULL" in mode else verified)
