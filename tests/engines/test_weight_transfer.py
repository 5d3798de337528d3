"""Ranks, the order of calls, deaths and refusals of weights from GPU to GPU, with engines played.

No test sends anything over a GPU. `test_vllm_receiver.py` has vLLM's side of it.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlsched.engines import (
    ProcessEngine,
    VLLMEngine,
    weight_transfer,
)
from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines.devices import check_devices, variables_of
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineDied, EngineSpec, Sizes
from lit_rlsched.engines.weight_transfer import WeightTransfer, pack
from lit_rlsched.engines.weights import HandedWeights, PackedWeights, WeightSource
from lit_rlsched.settings import RunFailed, UsageError

SPEC = EngineSpec("", 4, 64, (1,), device=torch.device("cuda", 0))


@dataclass
class World:
    """What happens, in order, and what shall go wrong."""

    log: list[Any] = field(default_factory=list)
    dies: Callable[[str, str], bool] = lambda engine, call: False
    waits: Callable[[str, str], bool] = lambda engine, call: False
    ended: threading.Event = field(default_factory=threading.Event)


class Child:
    """An engine's process."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine

    def call(self, *message: Any) -> Any:
        what, call, *arguments = message
        assert what == "engine"
        world, name = self.engine.world, self.engine.name
        world.log.append((name, call, *arguments))
        if world.waits(name, call):
            assert world.ended.wait(10)
        if world.dies(name, call):
            raise EngineDied
        return self.engine.gpus if call == "gpus" else None


class Engine:
    """What a transfer needs of a `ProcessEngine`."""

    trainer_address, gpus_advice = "127.0.0.1", "Do this"

    def __init__(self, world: World, index: int, *gpus: str) -> None:
        self.world, self.name = world, f"e{index}"
        self.numbered_name = f"engine {index}"
        self.gpus = [*gpus]
        self.child = Child(self)

    def revive(self) -> None:
        raise RunFailed(f"{self.numbered_name} died")


class Source(WeightSource):
    """Weights of a number of buckets."""

    def __init__(self, world: World, count: int = 2) -> None:
        self.world, self.count = world, count

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError

    def packed(self, dtype: torch.dtype) -> Generator[PackedWeights, None, None]:
        try:
            for i in range(self.count):
                self.world.log.append(("trainer", "gather", i))
                weight = torch.full((2, 2), i, dtype=dtype)
                yield pack([(f"w{i}", weight)], i == self.count - 1)
        finally:
            self.world.log.append(("trainer", "gathered"))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    sent = threading.local()

    class Group:
        """NCCL, without a GPU: a broadcast ends when every engine has the message."""

        disabled = False

        def __init__(self, where: dict[str, Any]) -> None:
            world.log.append(("trainer", "open", where))
            self.destroyed = threading.Event()

        def broadcast(self, data: Tensor, src: int, stream: Any) -> None:
            assert src == 0 and not self.destroyed.is_set()
            sent.group = self
            world.log.append(("trainer", "broadcast", data.view(torch.bfloat16).tolist()))

        def destroy(self) -> None:
            self.destroyed.set()
            world.log.append(("trainer", "destroy"))

    class Stream:
        def synchronize(self) -> None:
            if any(world.waits(f"e{i}", "receive_weights") for i in range(4)):
                assert sent.group.destroyed.wait(10)

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(weight_transfer, "gpu_of", lambda device: "GPU-T")
    monkeypatch.setattr(weight_transfer, "GRACE", 0.2)
    monkeypatch.setattr(weight_transfer, "open_group", Group)
    monkeypatch.setattr(guest, "import_vllm", lambda: world.log.append(("trainer", "import")))
    return world


def calls(world: World, *names: str) -> list[tuple[Any, ...]]:
    """What was called, without who; `names` alone if some are given."""
    return [entry[1:] for entry in world.log if not names or entry[1] in names]


# Ranks


def test_each_engine_joins_with_its_own_ranks(world: World) -> None:
    engines = [Engine(world, i, f"GPU-{i}a", f"GPU-{i}b") for i in range(3)]
    WeightTransfer(SPEC, engines).write(Source(world), torch.bfloat16)
    joins = {entry[0]: entry[2] for entry in world.log if entry[1] == "join_transfer"}
    ((_, common),) = calls(world, "open")
    assert common["master_address"] == "127.0.0.1" and common["world_size"] == 7
    assert joins == {f"e{i}": {**common, "rank_offset": 1 + 2 * i} for i in range(3)}


# The order of calls


def test_nccl_gathers_when_all_are_ready_and_sends_one_message_for_each_bucket(
    world: World,
) -> None:
    engines = [Engine(world, 0, "GPU-1"), Engine(world, 1, "GPU-2")]
    transfer = WeightTransfer(SPEC, engines)
    assert [*transfer.write(Source(world), torch.bfloat16)] == []
    ready = max(i for i, entry in enumerate(world.log) if entry[1] in ("join_transfer", "open"))
    assert world.log.index(("trainer", "gather", 0)) > ready
    update = {"names": ["w0"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}
    for name in ("e0", "e1"):
        asked = [e[1:] for e in world.log if e[0] == name and e[1] != "join_transfer"]
        assert asked == [
            ("gpus",),
            ("receive_weights", update, True, False),
            ("receive_weights", {**update, "names": ["w1"]}, False, True),
        ]
    trainer = [entry[1:3] for entry in world.log if entry[0] == "trainer"]
    assert trainer[2:] == [
        ("gather", 0),
        ("broadcast", [0.0] * 4),
        ("gather", 1),
        ("broadcast", [1.0] * 4),
        ("gathered",),
    ], "a bucket is gathered before it is sent, and the next one after that"


def test_the_second_sync_finds_the_group_open(world: World) -> None:
    transfer = WeightTransfer(SPEC, [Engine(world, 0, "GPU-1")])
    transfer.write(Source(world), torch.bfloat16)
    world.log.clear()
    transfer.write(Source(world), torch.bfloat16)
    assert not calls(world, "open", "join_transfer", "destroy")
    assert len(calls(world, "gpus")) == 1, "every worker is asked whether it is ready"


# Deaths


@pytest.mark.parametrize("when", ["gpus", "join_transfer", "receive_weights"])
def test_an_engine_that_dies_ends_the_run_though_another_waits_for_it(
    world: World, when: str
) -> None:
    engines = [Engine(world, i, f"GPU-{i}") for i in range(3)]
    world.dies = lambda name, call: (name, call) == ("e1", when)
    world.waits = lambda name, call: name == "e2" and call == when != "gpus"
    with pytest.raises(RunFailed, match="engine 1 died"):
        WeightTransfer(SPEC, engines).write(Source(world), torch.bfloat16)
    if when == "receive_weights":
        assert world.log.index(("trainer", "destroy")) < world.log.index(("trainer", "gathered"))
    world.ended.set()


def test_an_error_of_an_engine_is_raised_while_the_others_wait(world: World) -> None:
    engines = [Engine(world, i, f"GPU-{i}") for i in range(2)]
    world.waits = lambda name, call: (name, call) == ("e1", "receive_weights")

    def fail(*message: Any) -> Any:
        if message[1] == "receive_weights":
            raise ValueError("no such layer")
        return ["GPU-0"]

    engines[0].child.call = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such layer"):
        WeightTransfer(SPEC, engines).write(Source(world), torch.bfloat16)
    assert calls(world, "destroy")
    world.ended.set()


# Refusals


def test_the_trainers_own_gpu(world: World) -> None:
    engines = [Engine(world, 0, "GPU-1"), Engine(world, 1, "GPU-T")]
    message = r"`Engine\(weight_transfer='nccl'\)`: engine 1 is on GPU-T, the trainer's .* Do this"
    with pytest.raises(UsageError, match=message):
        WeightTransfer(SPEC, engines).write(Source(world), torch.bfloat16)
    assert not calls(world, "open", "gather")


def test_two_engines_on_one_gpu(world: World) -> None:
    engines = [Engine(world, 0, "GPU-1", "GPU-2"), Engine(world, 1, "GPU-2")]
    with pytest.raises(UsageError, match="engine 0 and engine 1 are both on GPU-2"):
        WeightTransfer(SPEC, engines).write(Source(world), torch.bfloat16)


# Where engines are


def test_with_nccl_the_first_gpus_are_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EngineSpec("", 4, 64, (1,), device=torch.device("cuda", 0), first_gpu=2)
    assert variables_of(spec, 1, {}) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert variables_of(spec, 2, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}) == {
        "CUDA_VISIBLE_DEVICES": "5,4"
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    check_devices(spec, 1)
    with pytest.raises(UsageError, match=r"has 3, of which the trainer has 2\. Leave `weight_tr"):
        check_devices(spec, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"`num_engines=1`.* Leave `weight_transfer='nccl'` out"):
        ProcessEngine(weight_transfer="nccl").start(spec)


def test_the_engine_in_the_process_is_told() -> None:
    engine = ProcessEngine(VLLMEngine(), weight_transfer="nccl")
    assert engine.engine.weight_transfer == "nccl"
    pool = EnginePool.of(engine, 2)
    assert pool.weight_transfer == "nccl"
    assert [e.engine.weight_transfer for e in pool.engines] == ["nccl", "nccl"]  # type: ignore[attr-defined]
    assert ProcessEngine().engine.weight_transfer is None


def test_engines_of_a_pool_share_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pool = EnginePool.of(ProcessEngine(weight_transfer="nccl"), 2)
    first, second = pool.engines
    assert isinstance(first, ProcessEngine) and isinstance(second, ProcessEngine)
    first.reserve(SPEC, pool.engines)
    assert first._transfer is not None and first._transfer is second._transfer
    first.close()
    assert first._transfer is None


def test_what_was_sent_is_not_handed_over_again_nor_a_dead_process_replaced() -> None:
    engine = ProcessEngine(weight_transfer="nccl")
    sends: list[Any] = []
    source = Source(World())
    engine._spec = SPEC
    engine._store = engine._transfer = SimpleNamespace(  # type: ignore[assignment]
        write=lambda named, dtype: sends.append(named) or HandedWeights(), close=lambda: None
    )
    engine._child = SimpleNamespace(  # type: ignore[assignment]
        kill=lambda: "died of SIGKILL", close=lambda: None
    )
    engine.sync_weights(source, 3)
    assert sends == [source]
    message = r"The process of the engine died of SIGKILL\. .* keeps no copy .* last checkpoint"
    with pytest.raises(RunFailed, match=message):
        engine.revive()
    assert not engine.alive


def test_nothing_is_handed_over_through_the_host(tiny_model: str) -> None:
    spec, sizes = EngineSpec(tiny_model, 4, 64, (1,)), Sizes(1000, 4, 2**30)
    assert ProcessEngine().footprint(spec, sizes).handed_over == 4000
    assert ProcessEngine(weight_transfer="nccl").footprint(spec, sizes).handed_over == 0
