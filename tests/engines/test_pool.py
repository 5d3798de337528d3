"""Several engines as one. What they draw is tested in `tests/rollout/test_pool.py`."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.pool import WINDOW, EnginePool
from lit_rlsched.engines.spec import EngineSpec, Footprint, Sizes
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.types import Request, Sampling

SPEC = EngineSpec("", 4, 64, (1,), kv_cache_bytes=1000)


class Noted(SimulatedEngine):
    """Notes what it was started with, and fails where it is told."""

    fails = False

    def start(self, spec):
        self.spec, self.closed = spec, False
        if self.fails:
            raise ValueError("not this one")
        super().start(spec)

    def close(self):
        self.closed = True
        super().close()


class Steps(SimulatedEngine):
    """Makes one step at a time."""

    def steps_to_event(self):
        return 1


def started(*engines):
    pool = EnginePool(engines)
    pool.start(SPEC)
    return pool


def requests(names):
    return [Request(name, (5,), 0, Sampling(20)) for name in names]


def test_each_engine_gets_its_share():
    pool = started(Noted(), Noted())
    specs = [
        (e.spec.slots, e.spec.kv_cache_bytes, e.spec.index, e.spec.engines) for e in pool.engines
    ]
    assert specs == [(2, 500, 0, 2), (2, 500, 1, 2)]


def test_an_engine_that_fails_to_start_closes_the_others():
    first, second = Noted(), Noted()
    second.fails = True
    with pytest.raises(ValueError, match="not this one"):
        started(first, second)
    assert first.closed and second.closed


def test_an_error_of_one_comes_after_the_calls_of_all():
    failed, ended = threading.Event(), []

    def call(engine):
        if engine is pool.engines[0]:
            failed.set()
            raise ValueError("not this one")
        failed.wait()
        time.sleep(0.1)
        ended.append(engine)

    pool = EnginePool([Noted(), Noted()])
    pool.decodes_by_itself = True
    with pytest.raises(ValueError, match="not this one"):
        pool.each(call)
    assert ended == [pool.engines[1]]


def test_what_one_engine_lacks_all_lack():
    with_all, without = Noted(), Noted()
    with_all.decodes_by_itself = True
    with_all.logprobs, without.logprobs = True, False
    pool = EnginePool([with_all, without])
    assert not pool.logprobs and not pool.decodes_by_itself
    pool = started(SimulatedEngine(kv_capacity=100), SimulatedEngine(kv_capacity=50))
    assert pool.kv_capacity == 50


def test_memory_of_a_device_that_engines_share():
    class Sized(SimulatedEngine):
        def footprint(self, spec, sizes):
            return Footprint(10, 100, True, "weights", "cache")

        def cache_tokens(self, spec, footprint, token_bytes):
            return footprint.cache // token_bytes

    sizes = Sizes(1, 1, 1)
    for device, engines in (("cpu", 2), ("cuda", 1)):
        spec = EngineSpec("", 4, 64, (1,), device=torch.device(device))
        pool = EnginePool([Sized(), Sized()])
        held = pool.footprint(spec, sizes)
        assert (held.weights, held.cache) == (10 * engines, 100 * engines)
        assert pool.cache_tokens(spec, held, 5) == 20
        assert pool.most_slots(spec) == 2 * Sized().most_slots(spec)


def test_engines_that_wait_for_each_other_in_every_turn():
    def engine(seconds):
        return Steps(lambda request: 9, step_time_base=seconds, per_running=0, per_kv_token=0)

    pool = started(engine(1.0), engine(2.0))
    worker = pool.make_worker(Admission(2))
    worker.start_round(ahead=False)
    worker.submit(requests(["a/0", "b/0"]))
    for _ in range(3):
        worker.step()
    assert [round(engine.now(), 1) for engine in pool.engines] == [5.0, 6.0]


def test_a_request_that_paused_goes_on_where_it_began():
    pool = EnginePool([Steps(lambda request: 20) for _ in range(2)])
    pool.start(replace(SPEC, slots=2))
    worker = pool.make_worker(Admission(1))
    worker.start_round(ahead=False)
    first, second = requests(["a/0", "a/1"])
    worker.submit([first, replace(second, pause_at=1)])
    (paused,) = [event for event in worker.step() if event.finish_reason]
    assert (paused.request_id, paused.finish_reason) == ("a/1", "paused")
    worker.submit([replace(second, prefix_ids=tuple(paused.token_ids))])
    worker.step()
    assert [sorted(one.running) for one in worker.workers] == [["a/0"], ["a/1"]]


def test_metrics_are_sums_over_the_engines():
    worker = started(SimulatedEngine(), SimulatedEngine()).make_worker(Admission(2))
    for restarts, one in enumerate(worker.workers, start=1):
        one.metrics = lambda restarts=restarts: {"rollout/engine_restarts": restarts}
    assert worker.metrics()["rollout/engine_restarts"] == 3


def test_engines_need_not_wait_once_nobody_waits():
    pool = EnginePool([Steps(lambda request: 20) for _ in range(2)])
    pool.start(replace(SPEC, slots=2))
    worker, allowed = pool.make_worker(Admission(1)), []
    worker.workers[0].allow = allowed.append
    for names, steps in ((["a/0", "a/1"], [0, None]), (["a/0", "a/1", "a/2"], [0, WINDOW])):
        worker.start_trace()
        worker.start_round(ahead=True)
        worker.submit(requests(names))
        worker.step()
        assert [len(one.running) for one in worker.workers] == [1, 1]
        assert allowed == steps
        allowed.clear()
        worker.abort()


def test_a_round_begins_without_what_the_last_one_knew():
    pool = EnginePool([Steps(lambda request: 20) for _ in range(2)])
    pool.start(replace(SPEC, slots=2))
    worker = pool.make_worker(Admission(1))

    def run(*names):
        worker.start_trace()
        worker.start_round(ahead=False)
        worker.submit(requests(names))
        worker.step()
        running = [sorted(one.running) for one in worker.workers]
        worker.abort()
        return running

    assert run("a/0", "b/0") == [["a/0"], ["b/0"]]
    assert run("b/0") == [["b/0"], []], "another engine than before"
    for _ in range(2):  # a request that has begun in this round only does not move
        assert run("a/0", "a/1") == [["a/0"], ["a/1"]]
    assert run("a/1", "a/0") == [["a/1"], ["a/0"]]
