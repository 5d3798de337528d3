"""What `VLLMEngine` does on a GPU, as far as it can be run without one."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_build

from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines._vllm_args import engine_args
from lit_rlsched.engines.devices import driver
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.settings import UsageError

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
CUDA = torch.device("cuda:0")


# The process


@pytest.mark.parametrize("chosen", [None, "tf32"])
def test_triton_is_told_to_multiply_fp32_as_it_is(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    if chosen:
        monkeypatch.setenv("TRITON_F32_DEFAULT", chosen)
    monkeypatch.setattr(guest, "_originals", {"patched": print})
    monkeypatch.setattr(guest, "import_module", lambda name: os.environ["TRITON_F32_DEFAULT"])
    assert guest.import_vllm() == (chosen or "ieee"), "it is set before vLLM is there"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_heeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert import_module("triton").knobs.language.fp32_default == "ieee"


def test_the_precision_of_matrix_products_is_the_trainers() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with guest._matmul_precision():
            torch.set_float32_matmul_precision("highest")
        assert torch.get_float32_matmul_precision() == "high"

        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        with guest._matmul_precision():
            torch.set_float32_matmul_precision("highest")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def platform(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    found = SimpleNamespace(current_platform=SimpleNamespace(device_type=device_type))
    monkeypatch.setattr(guest, "import_module", lambda name: found)


@pytest.mark.parametrize(
    ("build", "device", "message"),
    [
        ("cpu", "cuda:1", r"is on `cuda:1`, and this vLLM decodes on cpu.*Install `vllm` in place"),
        ("cuda", "cpu", r"is on the CPU, and this vLLM decodes on cuda\. Run on the GPU .*`vllm-c"),
        ("", "cpu", r"is on the CPU, and this vLLM decodes on nothing\. Run on"),
    ],
)
def test_a_build_for_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, build: str, device: str, message: str
) -> None:
    platform(monkeypatch, build)
    monkeypatch.setattr(guest, "unseen_gpu", lambda: None)
    monkeypatch.setattr(guest, "import_vllm", lambda: None)
    with pytest.raises(UsageError, match=message + ".*TransformersEngine") as refused:
        VLLMEngine().start(EngineSpec("nowhere", 1, 64, (1,), device=torch.device(device)))
    if device == "cpu":
        assert vllm_build.REFUSAL in str(refused.value), "so that tests can be skipped"
        monkeypatch.setattr(guest, "unseen_gpu", lambda: "The driver is old.")
        with pytest.raises(UsageError, match=r"The driver is old\. Run on"):
            guest.check_build(torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_right_build_is_taken(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    platform(monkeypatch, device.partition(":")[0])
    guest.check_build(torch.device(device))


@needs_vllm
@pytest.mark.skipif(driver() is not None, reason="there is a GPU")
def test_the_build_that_is_installed_says_what_it_is_for() -> None:
    guest.import_vllm()
    guest.check_build(torch.device("cpu"))


# Engine arguments


def spec(slots: int, length: int = 1024, device: torch.device = CUDA) -> EngineSpec:
    return EngineSpec("nowhere", slots, length, (1,), device=device)


@pytest.mark.parametrize(
    ("slots", "length", "kwargs", "tokens", "device"),
    [
        (256, 1024, {}, 8192, "cuda:0"),
        (4096, 1024, {}, 8192, "cuda:0"),
        (10_000, 1024, {}, 10_000, "cuda:0"),
        (4, 128, {}, 512, "cuda:0"),
        (256, 1024, {"max_num_batched_tokens": 2048}, 2048, "cuda:0"),
        (4, 1024, {}, 4096, "cpu"),
        (5000, 1024, {}, 5000, "cpu"),
    ],
)
def test_a_step_takes_a_token_of_each_slot(
    slots: int, length: int, kwargs: dict[str, Any], tokens: int, device: str
) -> None:
    engine = VLLMEngine(engine_kwargs=kwargs, kv_cache_gib=1 if device == "cpu" else None)
    args = engine_args(engine, spec(slots, length, torch.device(device)))
    assert args["max_num_batched_tokens"] == tokens


@needs_vllm
def test_vllm_takes_as_many_slots(tiny_model: str) -> None:
    """Its own checks of what it is given; the default on a GPU, 2,048 tokens, fails in them."""
    vllm = guest.import_vllm()
    args = engine_args(VLLMEngine(), EngineSpec(tiny_model, 4096, 128, (1,), device=CUDA))
    args |= {"enable_sleep_mode": False}  # which the CPU has not
    scheduler = vllm.EngineArgs(**args).create_engine_config().scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (4096, 8192)
    with pytest.raises(ValueError, match=r"2048\) must be greater than or equal to max_num_seqs"):
        vllm.EngineArgs(**args | {"max_num_batched_tokens": 2048}).create_engine_config()


# Sleep


class Driver:
    """The C part of vLLM's allocator (`csrc/cumem_allocator.cpp`), without memory.

    A call of the driver that fails leaves an error behind. The functions for Python raise and
    clear it; `free`, which PyTorch calls, does neither, and every `malloc` fails then.
    """

    def __init__(self) -> None:
        self.mapped: set[int] = set()
        self.error = ""
        self.next = 0
        self.allocator: Any

    def create(self, *handle: int) -> None:
        if handle[2] in self.mapped:
            self.error = "already mapped"
        self.mapped.add(handle[2])

    def unmap(self, *handle: int) -> None:
        if handle[2] not in self.mapped:
            self.error = "invalid argument"
        self.mapped.discard(handle[2])

    def python_create_and_map(self, *handle: int) -> None:
        self.create(*handle)
        self._raise()

    def python_unmap_and_release(self, *handle: int) -> None:
        self.unmap(*handle)
        self._raise()

    def _raise(self) -> None:
        error, self.error = self.error, ""
        if error:
            raise RuntimeError(f"CUDA Error: {error}")

    def malloc(self, tag: str) -> int | None:
        if self.error:
            return None
        self.next += 1
        self.allocator.current_tag = tag
        self.allocator._python_malloc_callback((0, 64, self.next, self.next))
        self.create(0, 64, self.next, 0)
        return self.next

    def free(self, address: int) -> None:
        self.unmap(*self.allocator._python_free_callback(address))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """vLLM's own allocator in Python, on top of that."""
    guest.import_vllm()
    name, fake = "vllm.device_allocator.cumem", Driver()
    extension: Any = ModuleType("vllm.cumem_allocator")
    extension.init_module = print
    extension.python_create_and_map = fake.python_create_and_map
    extension.python_unmap_and_release = fake.python_unmap_and_release
    monkeypatch.setitem(sys.modules, "vllm.cumem_allocator", extension)
    runtime = import_module("vllm.distributed.device_communicators.cuda_wrapper")
    monkeypatch.setattr(runtime, "CudaRTLibrary", lambda: SimpleNamespace(cudaMemcpy=print))
    system = import_module("vllm.utils.system_utils")
    monkeypatch.setattr(system, "find_loaded_library", lambda name: name)
    monkeypatch.delitem(sys.modules, name, raising=False)
    cumem: Any = import_module(name)
    for module, function in (
        (torch.cuda, "synchronize"),
        (torch.cuda, "empty_cache"),
        (torch.accelerator, "empty_cache"),
        (torch.accelerator, "synchronize"),
    ):
        monkeypatch.setattr(module, function, lambda *args: None)
    monkeypatch.setattr(cumem, "gc", SimpleNamespace(collect=lambda: 0))  # takes a second
    monkeypatch.setattr(cumem, "PIN_MEMORY", False)
    fake.allocator = cumem.CuMemAllocator()
    try:
        yield fake
    finally:
        sys.modules.pop(name, None)


class SleepyLLM:
    """An `LLMEngine` whose weights and cache come from vLLM's allocator."""

    def __init__(self, gpu: Driver, calls: list[str]) -> None:
        self.gpu, self.calls = gpu, calls
        self.engine_core = self
        tags = ("weights", "weights", "kv_cache")
        self.memory = [address for tag in tags if (address := gpu.malloc(tag)) is not None]
        assert len(self.memory) == len(tags), "out of memory, it seems"

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.gpu.allocator.sleep(("weights",) if level == 1 else ())

    def wake_up(self) -> None:
        self.calls.append("wake_up")
        self.gpu.allocator.wake_up()

    def shutdown(self) -> None:
        for address in self.memory:
            self.gpu.free(address)


def sleepy(gpu: Driver, **settings: Any) -> tuple[VLLMEngine, list[str]]:
    calls: list[str] = []
    engine = VLLMEngine(**settings)
    engine._engine, engine._spec = SleepyLLM(gpu, calls), spec(4)
    engine._apart, engine._meeting_place = False, None
    return engine, calls


@needs_vllm
def test_an_engine_starts_where_one_was_closed_in_its_sleep(gpu: Driver) -> None:
    for _ in range(2):
        engine, _ = sleepy(gpu)
        engine.sleep()
        assert not gpu.mapped, "the trainer has all of the memory"
        engine.wake()
        assert len(gpu.mapped) == 3
        engine.sleep()
        engine.close()
        assert (gpu.mapped, gpu.error, gpu.allocator.get_current_usage()) == (set(), "", 0)
    sleepy(gpu)[0].close()
    assert (gpu.mapped, gpu.error) == (set(), "")


@needs_vllm
def test_an_engine_that_cannot_be_woken_is_closed_with_a_warning(gpu: Driver) -> None:
    engine, _ = sleepy(gpu)
    engine.sleep()
    gpu.error = "out of memory"
    with pytest.warns(UserWarning, match=r"woken before it was closed \(CUDA Error: out of"):
        engine.close()


@needs_vllm
@pytest.mark.parametrize("attribute", ["_apart", "ends_with_process"])
def test_memory_of_a_process_that_ends_is_left_alone(gpu: Driver, attribute: str) -> None:
    engine, calls = sleepy(gpu)
    engine.sleep()
    setattr(engine, attribute, True)
    engine.close()
    assert calls == ["sleep 2"]


@needs_vllm
def test_weights_are_not_kept_in_the_sleep(gpu: Driver) -> None:
    engine, calls = sleepy(gpu)
    engine.sleep()
    kept = [data.cpu_backup_tensor for data in gpu.allocator.pointer_to_data.values()]
    assert kept == [None] * 3
    engine.wake()
    assert calls == ["sleep 2", "wake_up"]
    awake, calls = sleepy(gpu, enable_sleep_mode=False)
    awake.sleep()
    awake.wake()
    assert not calls
