"""What the trainer does around the engine."""

import gc
from types import SimpleNamespace

import pytest
import torch

from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession

CUDA = torch.device("cuda:0")


class Stop(Exception):
    """Instead of a rollout."""


class Said(list):
    """What was called, in order."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.append(name)


@pytest.fixture
def said(monkeypatch):
    said = Said()
    monkeypatch.setattr(gc, "collect", said.collect)
    monkeypatch.setattr(torch.cuda, "empty_cache", said.empty_cache)
    return said


def make_session(said, monkeypatch, device, sync=lambda version: {}):
    class Engine(TransformersEngine):
        start, wake, sleep, close = said.start, said.wake, said.sleep, said.close

        def make_worker(self, admission):
            return SimpleNamespace(trace=None)

    spec = EngineSpec("", 2, 8, (), device=device)
    return RolloutSession(Engine(), spec, Unscored(), sync, seed=0)


def test_cached_memory_is_given_back_before_the_engine_takes_its_share(said, monkeypatch):
    def sync(version):
        said.sync()
        raise Stop

    session = make_session(said, monkeypatch, CUDA, sync)
    assert said == ["collect", "empty_cache", "start"]
    said.clear()
    with pytest.raises(Stop):
        Rollout(session, [], 0).load_weights()
    assert said == ["collect", "empty_cache", "wake", "sync", "sleep"]
    said.clear()
    session.restart(1)
    assert said == ["close", "collect", "empty_cache", "start"]


def test_on_cpu_there_is_none(said, monkeypatch):
    make_session(said, monkeypatch, torch.device("cpu"))
    assert said == ["start"]


def test_a_process_that_is_replaced_finds_the_memory_too(said, monkeypatch):
    engine = ProcessEngine(TransformersEngine())
    engine._spec = EngineSpec("", 2, 8, (), device=CUDA)

    def child(*_):
        said.child()
        raise Stop

    monkeypatch.setattr("lit_rlsched.engines.process_engine.PipeChild", child)
    with pytest.raises(Stop):
        engine._launch()
    assert said == ["collect", "empty_cache", "child"]
