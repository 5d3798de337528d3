"""How weights are packed for vLLM's weight transfer, and what each rank does for it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Barrier, Event, local
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lit_rlsched.engines import weight_transfer
from lit_rlsched.engines.weight_transfer import pack, packed_weights
from lit_rlsched.engines.weights import PackedWeights, buckets
from lit_rlsched.ranks import Team

BF16, FP32 = torch.bfloat16, torch.float32


def tensors(*sizes: int) -> list[tuple[str, Tensor]]:
    return [(f"w{i}", torch.full((n,), i, dtype=torch.uint8)) for i, n in enumerate(sizes)]


@hypothesis.given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_buckets_are_as_large_as_they_may_be(sizes: list[int], limit: int) -> None:
    named = tensors(*sizes)
    groups = [([*group], last) for group, last in buckets(named, limit)]
    assert [pair for group, _ in groups for pair in group] == named
    assert [last for _, last in groups] == [False] * (len(groups) - 1) + [True]
    held = [sum(tensor.nbytes for _, tensor in group) for group, _ in groups]
    for (group, _), size in zip(groups, held, strict=True):
        assert size <= limit or len(group) == 1
    for i, (group, _) in enumerate(groups[1:]):
        assert held[i] + group[0][1].nbytes > limit


def test_nothing_is_one_bucket_less() -> None:
    assert [*buckets([], 4)] == []


def test_a_bucket_is_sent_before_the_next_is_gathered() -> None:
    gathered: list[str] = []

    def gathering() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(4, 4, 4, 4):
            gathered.append(name)
            yield name, tensor

    found = buckets(gathering(), 8)
    next(found)
    assert gathered == ["w0", "w1", "w2"], "one more, to know whether this was the last"


def mixed() -> list[tuple[str, Tensor]]:
    """Half precision with odd numbers of elements, among fp32."""
    return [
        ("a", torch.randn(3, 1).to(BF16)),
        ("norm", torch.randn(5)),
        ("b", torch.randn(3, 3).t().to(BF16)),
        ("scale", torch.tensor(2.0)),
    ]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_unpacks_what_was_packed() -> None:
    unpack: Any = import_module("vllm.distributed.weight_transfer.packed_tensor").unpack_tensor
    packed = pack(named := mixed(), last=True)
    found = unpack(packed.data, packed.names, packed.shapes, packed.dtypes, packed.sizes)
    assert dict(found).keys() == dict(named).keys()
    for name, tensor in found:
        torch.testing.assert_close(tensor, dict(named)[name], rtol=0, atol=0)


def test_tensors_begin_where_their_type_can() -> None:
    packed = pack(mixed(), last=False)
    starts = [sum(packed.sizes[:i]) for i in range(len(packed.sizes))]
    for start, dtype in zip(starts, packed.dtypes, strict=True):
        assert start % dtype.itemsize == 0
    assert packed.names == ["norm", "scale", "a", "b"]
    assert sum(packed.sizes) == packed.data.numel() and not packed.last


def test_matrices_are_rounded_before_they_are_packed() -> None:
    named = [("matrix", torch.ones(4, 4)), ("norm", torch.ones(4))]
    (packed,) = packed_weights(named, BF16, [], Team())
    assert dict(zip(packed.names, packed.dtypes, strict=True)) == {"norm": FP32, "matrix": BF16}
    assert packed.last and packed.handles == {}


class RanksTeam(Team):
    """One of several ranks, each a thread."""

    def __init__(self, rank: int, barrier: Barrier, box: list[Any]) -> None:
        self.rank, self._barrier, self._box = rank, barrier, box

    def all_gather(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait(timeout=10)
        found = [*self._box]
        self._barrier.wait(timeout=10)
        return found


def on_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: list[str], seen: Any = None
) -> list[list[PackedWeights]]:
    """Buckets that each rank yields, on GPUs of their own; every byte of a tensor is its rank."""
    here = local()
    monkeypatch.setattr(weight_transfer, "buckets", partial(buckets, limit=8))
    monkeypatch.setattr(weight_transfer, "gpu_of", lambda device: f"GPU-{here.rank}")
    monkeypatch.setattr(
        weight_transfer, "handle_of", lambda data: {f"GPU-{here.rank}": ("handle", int(data[0]))}
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    barrier, box = Barrier(ranks), [None] * ranks

    def rank(index: int) -> list[PackedWeights]:
        here.rank, found = index, []
        named = [(f"w{i}", torch.full((6,), index, dtype=torch.uint8)) for i in range(3)]
        for packed in packed_weights(named, FP32, gpus, RanksTeam(index, barrier, box)):
            found.append(packed)
            if seen is not None:
                seen(index, packed)
        if seen is not None and index:
            seen(index, None)
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(rank, range(ranks))]


def test_every_rank_on_an_engines_gpu_exports_its_own_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, second, third = on_ranks(monkeypatch, 3, ["GPU-0", "GPU-2"])
    assert [packed.names for packed in leader] == [["w0"], ["w1"], ["w2"]]
    assert [packed.last for packed in leader] == [False, False, True]
    for packed in leader:
        assert packed.handles == {"GPU-0": ("handle", 0), "GPU-2": ("handle", 2)}
    assert second == [], "an export that nobody reads would stay in memory"
    assert [packed.names for packed in third] == [packed.names for packed in leader]


def test_no_rank_goes_on_before_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader asks for the next bucket once the engines have read this one."""
    order: list[str] = []
    ended = Event()

    def seen(rank: int, packed: PackedWeights | None) -> None:
        if packed is None:
            ended.set()
        else:
            order.append(packed.names[0])
            if rank == 0:
                assert not ended.wait(0.1), "the other rank keeps its buffer"

    on_ranks(monkeypatch, 2, ["GPU-0", "GPU-1"], seen)
    assert order == ["w0", "w0", "w1", "w1", "w2", "w2"]


def test_ranks_that_only_gather_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = on_ranks(monkeypatch, 2, [])
    assert len(leader) == 3 and follower == []
    assert all(packed.handles == {} for packed in leader)
