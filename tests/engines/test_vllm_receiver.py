"""vLLM's side of weights from GPU to GPU: its own worker on CPU, with NCCL played."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from played_gpus import perturb, play
from transformers import PreTrainedModel

from lit_rlsched.engines import _vllm_worker as receiver
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.engines.weight_transfer import pack
from lit_rlsched.engines.weights import PackedWeights, buckets
from lit_rlsched.training.policy import named_weights
from lit_rlsched.types import Request, Sampling

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
LIMIT = 60_000
"""Bytes of a bucket: the tiny model has several."""
INIT = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 3, "world_size": 4}


@pytest.fixture(scope="module")
def started(tiny_model: str) -> Iterator[VLLMEngine]:
    engine = VLLMEngine()
    engine.weight_transfer = "nccl"
    engine.start(EngineSpec(tiny_model, 4, 128, ()))
    yield engine
    engine.close()


class Wire:
    """Buffers on their way, in place of NCCL."""

    def __init__(self) -> None:
        self.buffers: deque[torch.Tensor] = deque()
        self.init: Any = None
        self.disabled = False

    def open(self, init: Any, parallel_config: Any) -> "Wire":
        self.init = init
        return self

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.buffers.popleft())

    def destroy(self) -> None:
        """Called when the worker ends."""

    def send(self, engine: VLLMEngine, packed: PackedWeights, first: bool) -> None:
        self.buffers.append(packed.data)
        engine.receive_weights(packed.described, first, packed.last)


@pytest.fixture
def wire(started: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    play(monkeypatch.setattr, "GPU-0")
    transfer = "vllm.distributed.weight_transfer"
    stream = SimpleNamespace(synchronize=lambda: None)
    nccl, packed = (import_module(f"{transfer}.{n}") for n in ("nccl_engine", "packed_tensor"))
    monkeypatch.setattr(nccl, "worker_init_process_group", wire.open)
    monkeypatch.setattr(packed, "_get_streams", lambda *args: [stream])
    started.join_transfer(INIT)
    return wire


@pytest.fixture
def policy(tiny_policy: PreTrainedModel) -> PreTrainedModel:
    perturb(tiny_policy)
    return tiny_policy


def packs(policy: PreTrainedModel) -> list[PackedWeights]:
    found = [pack(group, last) for group, last in buckets(named_weights(policy), LIMIT)]
    assert len(found) > 3
    return found


def drawn(engine: VLLMEngine) -> list[tuple[list[int], list[float]]]:
    prompt = [5, 14, 6, 18, 33] * 8  # a block and more, which vLLM keeps for the next prompt
    engine.submit([Request(f"r{i}", prompt, i, Sampling(12)) for i in range(3)])
    found: dict[str, tuple[list[int], list[float]]] = {f"r{i}": ([], []) for i in range(3)}
    while events := engine.step():
        for event in events:
            found[event.request_id][0].extend(event.token_ids)
            found[event.request_id][1].extend(event.logprobs)
    return [*found.values()]


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in worker.get_model().named_parameters()}


def test_weights_are_those_of_a_sync_through_the_host(
    started: VLLMEngine, wire: Wire, policy: PreTrainedModel
) -> None:
    started.sync_weights(named_weights(policy), 1)
    (expected,) = started._live.collective_rpc(weights)
    tokens = drawn(started)
    others = ((name, torch.zeros_like(w)) for name, w in named_weights(policy))
    started.sync_weights(others, 2)
    stale = drawn(started)
    for i, packed in enumerate(packs(policy)):
        wire.send(started, packed, first=i == 0)
    (received,) = started._live.collective_rpc(weights)
    torch.testing.assert_close(received, expected, rtol=0, atol=0)
    assert drawn(started) == tokens != stale, "also the packed copy of the tied head is new"


def test_nothing_is_loaded_while_requests_run(
    started: VLLMEngine, wire: Wire, policy: PreTrainedModel
) -> None:
    started.submit([Request("r", [5, 14], 0, Sampling(8))])
    with pytest.raises(RuntimeError, match="Cannot load weights while 1 requests are running"):
        wire.send(started, packs(policy)[0], first=True)
    started.abort(["r"])


def test_the_worker_knows_its_ranks_and_takes_each_message_as_one_buffer(
    started: VLLMEngine, wire: Wire
) -> None:
    assert started.gpus() == ["GPU-0"]
    info = asdict(wire.init)
    assert INIT.items() <= info.items()
    assert info["packed"] and info["packed_buffer_size_bytes"] > 2**60
    wire.disabled = True
    with pytest.raises(RuntimeError, match="vLLM cannot load NCCL"):
        started.join_transfer(INIT)


def test_what_a_release_does_not_know_is_left_out() -> None:
    """0.27 keeps the size of buffers in the update, later ones in the first message."""
    nccl = import_module("vllm.distributed.weight_transfer.nccl_engine")
    update = {**receiver.WIRE, "names": [], "dtype_names": [], "shapes": []}
    assert not receiver.known(nccl.NCCLWeightTransferUpdateInfo, update).keys() & receiver.WIRE
    assert receiver.known(nccl.NCCLWeightTransferInitInfo, receiver.WIRE) == receiver.WIRE


def test_the_trainers_end_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    group = SimpleNamespace(disabled=False)
    nccl = SimpleNamespace(trainer_init=lambda info: opened.append(info) or group)
    monkeypatch.setattr(receiver, "import_module", lambda name: nccl)
    info = {"master_address": "10.0.0.1", "master_port": 5, "world_size": 3}
    assert receiver.open_group(info) is group and opened == [info]
    group.disabled = True
    with pytest.raises(RuntimeError, match=r"`weight_transfer='nccl'`: vLLM cannot load NCCL"):
        receiver.open_group(info)


def test_vllm_gets_the_backend(tiny_model: str) -> None:
    args = import_module("lit_rlsched.engines._vllm_args")
    engine, spec = VLLMEngine(), EngineSpec(tiny_model, 4, 128, ())
    assert "weight_transfer_config" not in args.engine_args(engine, spec)
    engine.weight_transfer = "nccl"
    assert args.engine_args(engine, spec)["weight_transfer_config"] == {"backend": "nccl"}
