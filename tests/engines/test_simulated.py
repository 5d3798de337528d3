import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.replay import RecordedCompletions
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.scheduling.recorded_lengths import (
    LogNormalLengths,
    TraceLengths,
)
from lit_rlsched.scheduling.trace_files import TraceWriter
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, Request, Sampling

EOS = 1


def start(engine: SimulatedEngine, slots: int = 8) -> SimulatedEngine:
    engine.start(EngineSpec("", slots, 10_000, (EOS,)))
    return engine


def request(name: str, prompt: int = 4, limit: int = 100, prefix: int = 0) -> Request:
    return Request(name, (5,) * prompt, 7, Sampling(limit), prefix_ids=(6,) * prefix)


def told(events: list[Event]) -> dict[str, tuple[int, str | None]]:
    return {event.request_id: (len(event.token_ids), event.finish_reason) for event in events}


def test_the_cost_of_three_requests_by_hand() -> None:
    engine = start(
        SimulatedEngine(
            {"a": 2, "b": 5, "c": 9},
            step_time_base=1.0,
            per_running=0.1,
            per_kv_token=0.001,
            per_prefill_token=0.5,
        )
    )
    engine.submit([request("a", 4), request("b", 6)])
    assert engine.now() == 0.0
    assert told(engine.step()) == {"a": (2, "stop"), "b": (2, None)}
    # two steps with two running, 10 and then 12 tokens in the cache, 10 tokens of prefill
    assert engine.now() == pytest.approx(2 * (1 + 0.2) + 0.001 * (10 + 12) + 0.5 * 10)
    assert (engine.stats().running, engine.stats().kv_tokens) == (1, 8)

    begin = engine.now()
    engine.submit([request("c", 3, limit=7)])
    assert told(engine.step()) == {"b": (3, "stop"), "c": (3, None)}
    assert engine.now() - begin == pytest.approx(3 * 1.2 + 0.001 * (11 + 13 + 15) + 0.5 * 3)

    begin = engine.now()
    assert told(engine.step()) == {"c": (4, "length")}
    assert engine.now() - begin == pytest.approx(4 * 1.1 + 0.001 * (6 + 7 + 8 + 9))
    stats = engine.stats()
    assert (stats.running, stats.kv_tokens) == (0, 0)
    assert (stats.decode_steps, stats.prefill_tokens) == (9, 13)
    assert engine.step() == []


@pytest.mark.parametrize("options", [{"max_jump": 1}, {"max_jump": 3}, {"stream": False}], ids=str)
def test_how_far_it_jumps_does_not_change_anything(options: dict) -> None:
    def run(engine: SimulatedEngine) -> tuple[dict[str, list], float]:
        drawn: dict[str, list] = {}
        waiting = [request(f"r{i}", 1 + i % 5, limit=60) for i in range(40)]
        while waiting or engine.stats().running:
            free = 8 - engine.stats().running
            engine.submit(waiting[:free])
            del waiting[:free]
            for event in engine.step():
                tokens = zip(event.token_ids, event.logprobs, strict=True)
                drawn.setdefault(event.request_id, []).extend(tokens)
        return drawn, engine.now()

    expected, seconds = run(start(SimulatedEngine()))
    drawn, other = run(start(SimulatedEngine(**options)))
    assert drawn == expected
    assert other == pytest.approx(seconds)


def test_a_resumed_request_is_as_long_as_it_was() -> None:
    lengths = LogNormalLengths(50, 0.3)
    total = lengths(request("a"))
    engine = start(SimulatedEngine(lengths))
    engine.submit([request("a", limit=1000, prefix=10)])
    (event,) = engine.step()
    assert len(event.token_ids) == total - 10
    assert event.token_ids[-1] == EOS and EOS not in event.token_ids[:-1]

    engine.submit([request("a", limit=1000, prefix=500)])  # longer than it should have become
    assert told(engine.step()) == {"a": (1, "stop")}


def test_an_aborted_request_leaves_no_trace() -> None:
    engine = start(SimulatedEngine({"a": 30, "b": 40, "c": 50}, per_prefill_token=1.0))
    engine.submit([request("a"), request("b")])
    engine.abort(["b"])
    engine.submit([request("b"), request("c")])
    assert told(engine.step())["a"] == (30, "stop")
    assert engine.stats().prefill_tokens == 12
    partial = engine.abort(["b", "nobody"])
    assert list(partial) == ["b"] and len(partial["b"].token_ids) == 30
    engine.submit([request("b")])
    assert told(engine.step()) == {"c": (20, "stop"), "b": (20, None)}
    assert told(engine.step()) == {"b": (20, "stop")}
    assert engine.stats().kv_tokens == 0


def test_tokens_fit_the_vocabulary() -> None:
    engine = start(SimulatedEngine([400], vocab_size=3))
    engine.submit([request("a", limit=300)])
    (event,) = engine.step()
    assert set(event.token_ids) == {0, 2}
    assert max(event.logprobs) <= 0


def test_ten_thousand_completions_take_a_second_or_two() -> None:
    engine = start(SimulatedEngine(LogNormalLengths(300, 1.0), stream=False), slots=256)
    waiting = [Request(f"r{i}", (5,) * 20, i, Sampling(4000)) for i in range(10_000)]
    begin, finished = time.perf_counter(), 0
    while finished < 10_000:
        free = 256 - engine.stats().running
        engine.submit(waiting[:free])
        del waiting[:free]
        finished += len(engine.step())
    assert time.perf_counter() - begin < 30  # about 1 on an idle core


def test_log_normal_lengths() -> None:
    lengths = LogNormalLengths(200, 0.5)
    drawn = sorted(lengths(request(f"r{i}")) for i in range(4000))
    assert drawn[2000] == pytest.approx(200, rel=0.05)
    assert drawn[3364] == pytest.approx(200 * 2.71828**0.5, rel=0.05)  # one sigma up
    assert LogNormalLengths(200, 0.5, seed=1)(request("a")) != lengths(request("a"))
    by_seed = LogNormalLengths(200, 0.5, key="seed")
    assert by_seed(request("a")) == by_seed(request("b"))


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    spans = {"request": ["a", "b", "a"], "tokens": [30, 20, 12]}  # `a` was resumed
    writer = TraceWriter(tmp_path)
    writer.begin(1, {})
    writer.add(1, {"spans": pa.table(spans)})
    engine = start(SimulatedEngine(tmp_path))
    engine.submit([request("a"), request("b")])
    assert told(engine.step()) == {"a": (20, None), "b": (20, "stop")}
    assert told(engine.step()) == {"a": (22, "stop")}
    with pytest.raises(UsageError, match="'c'"):
        engine.submit([request("a"), request("c")])
    assert engine.stats().running == 0


def test_a_list_of_lengths_is_drawn_from() -> None:
    trace = TraceLengths([10, 20, 30])
    assert {trace(request(f"r{i}")) for i in range(50)} == {10, 20, 30}


def test_it_jumps_to_the_next_pause() -> None:
    engine = start(SimulatedEngine({"a": 30, "b": 40}, step_time_base=1.0, per_kv_token=0.0))
    engine.submit([replace(request("a"), pause_at=12), request("b")])
    assert told(engine.step()) == {"a": (12, "length"), "b": (12, None)}
    assert engine.stats().decode_steps == 12
    engine.submit([replace(request("a", prefix=12), pause_at=30)])
    assert told(engine.step()) == {"a": (18, "stop"), "b": (18, None)}
    assert told(engine.step()) == {"b": (10, "stop")}


def test_recorded_completions_are_drawn_token_by_token() -> None:
    recording = RecordedCompletions({"a": [9, 8, 7, 6, EOS], "b": [5, 4, 3], "c": [2, 3, EOS]})
    engine = start(SimulatedEngine(recording))

    def drawn(one: Request) -> tuple[list[int], str | None]:
        engine.submit([one])
        (event,) = engine.step()
        return event.token_ids, event.finish_reason

    assert drawn(request("a")) == ([9, 8, 7, 6, EOS], "stop")
    assert drawn(request("a", limit=3)) == ([9, 8, 7], "length")
    assert drawn(replace(request("a"), pause_at=2)) == ([9, 8], "length")
    assert drawn(request("a", prefix=2)) == ([7, 6, EOS], "stop")
    assert drawn(request("b")) == ([5, 4, 3], "stop")
    assert drawn(request("b", limit=3)) == ([5, 4, 3], "length")  # so it was recorded
    assert drawn(request("c", limit=3)) == ([2, 3, EOS], "stop")


def test_the_cache_is_as_large_as_it_is_told_to_be() -> None:
    default = SimulatedEngine()
    assert (default.kv_block, default.kv_capacity) == (1, None)
    engine = start(SimulatedEngine(kv_block=16, kv_capacity=4096))
    assert (engine.kv_block, engine.kv_capacity) == (16, 4096)
    assert SimulatedEngine(kv_block=None).kv_block is None
