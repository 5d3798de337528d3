"""How weights are packed for vLLM's weight transfer, and what each rank does for it."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

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
    found = unpack(packed.data, packed.names, packed.shapes, packed.dtypes, sizes(packed))
    assert dict(found).keys() == dict(named).keys()
    for name, tensor in found:
        torch.testing.assert_close(tensor, dict(named)[name], rtol=0, atol=0)


def sizes(packed: PackedWeights) -> list[int]:
    pairs = zip(packed.dtypes, packed.shapes, strict=True)
    return [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in pairs]


def test_tensors_begin_where_their_type_can() -> None:
    packed = pack(mixed(), last=False)
    starts = [sum(sizes(packed)[:i]) for i in range(len(packed.names))]
    for start, dtype in zip(starts, packed.dtypes, strict=True):
        assert start % dtype.itemsize == 0
    assert packed.names == ["norm", "scale", "a", "b"]
    assert sum(sizes(packed)) == packed.data.numel() and not packed.last


def test_ranks_that_only_gather_keep_nothing() -> None:
    class Follower(Team):
        rank = 1

    gathered: list[str] = []
    named = ((gathered.append(name) or name, tensor) for name, tensor in tensors(4, 4))
    assert [*packed_weights(named, FP32, Follower())] == [] and gathered == ["w0", "w1"]
