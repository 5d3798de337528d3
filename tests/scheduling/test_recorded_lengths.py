import math
from statistics import NormalDist

import pyarrow as pa
import pytest

from lit_rlsched.scheduling.recorded_lengths import (
    LogNormalLengths,
    TraceLengths,
)
from lit_rlsched.scheduling.trace_files import TraceWriter
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling, stable_hash


def request(name, seed=0, prefix=()):
    return Request(name, [1], seed, Sampling(100), prefix)


def test_log_normal_lengths_by_their_definition():
    """They must never change: figures of simulations depend on them."""
    for settings, draws in (
        ({}, (64, 1.0, 0)),
        ({"median": 300, "sigma": 0.5, "seed": 9}, (300, 0.5, 9)),
    ):
        lengths, (median, sigma, seed) = LogNormalLengths(**settings), draws
        for name in map(str, range(20)):
            z = NormalDist().inv_cdf((stable_hash(seed, name) + 0.5) / 2**63)
            assert lengths(request(name)) == max(1, round(median * math.exp(sigma * z)))


def test_a_length_belongs_to_the_request_or_to_its_seed():
    by_id, by_seed = LogNormalLengths(1000), LogNormalLengths(1000, key="seed")
    assert by_id(request("a", 1)) == by_id(request("a", 2)) != by_id(request("b", 1))
    assert by_seed(request("a", 1)) == by_seed(request("b", 1)) != by_seed(request("a", 2))


def test_log_normal_lengths_at_the_ends(monkeypatch):
    assert {LogNormalLengths(7, 0.0)(request(str(i))) for i in range(9)} == {7}
    assert {LogNormalLengths(0.01, 0.5)(request(str(i))) for i in range(9)} == {1}
    name = "lit_rlsched.scheduling.recorded_lengths.stable_hash"
    for hashed, longest in ((0, False), (2**63 - 1, True)):
        monkeypatch.setattr(name, lambda *parts, hashed=hashed: hashed)
        length = LogNormalLengths(1000, 1.0)(request("a"))
        assert 1e6 < length < 1e8 if longest else length == 1


def test_given_lengths_are_looked_up_or_drawn():
    named = TraceLengths({"a": 5, "b": 6})
    assert [named(request(n)) for n in "ab"] == [5, 6]
    with pytest.raises(UsageError, match="'c' has no length"):
        named(request("c"))
    listed = TraceLengths([10, 20, 30])
    for i in range(9):
        expected = [10, 20, 30][stable_hash(str(i)) % 3]
        assert listed(request(str(i))) == listed(request(str(i), seed=4)) == expected
    for nothing in ([], {}):
        with pytest.raises(UsageError, match="at least one length"):
            TraceLengths(nothing)


def test_a_folder_of_traces_is_read_whole(tmp_path):
    writer = TraceWriter(tmp_path)
    writer.begin(1, {})
    for number, rows in enumerate(({"a": 3, "b": 4}, {"a": 30, "c": 5}), start=1):
        spans = pa.table({"request": list(rows), "tokens": list(rows.values())})
        writer.add(number, {"spans": spans, "steps": pa.table({"tokens": [99]})})
    for path in (tmp_path, str(tmp_path)):
        assert dict(TraceLengths(path).lengths) == {"a": 33, "b": 4, "c": 5}
