"""Lets a vLLM request that paused or was aborted resume with the noise where it stopped.

vLLM's first model runner draws with one random generator per request and drops it when the request
leaves. `KeptNoise`, next to the model, keeps these generators under a key; `Noise`, next to the
scheduler, knows the key of each request. The second model runner (`vllm.v1.worker.gpu`, the default
of recent CUDA builds) hashes seed and position, so there is nothing to keep.
"""

from itertools import count
from typing import Any

import torch

from lit_rlsched.types import Request, stable_hash

NOISE = "lit_rlsched_noise"
"""Entry of a request's `extra_args` with its key, followed by the keys to forget."""


class Noise:
    """The keys under which the generators of requests are kept.

    Args:
        by_position: Whether the model runner hashes seed and position.
    """

    def __init__(self, by_position: bool) -> None:
        self._by_position = by_position
        self._keys = count()
        self._running: dict[str, int] = {}  # request id -> key
        self._kept: dict[str, tuple[int, int, int]] = {}  # request id -> seed, length, key
        self._ended: list[int] = []  # keys that are no longer needed

    def seed(self, request: Request) -> int:
        """Seed for vLLM; a kept generator of the request is used instead of it."""
        drawn = len(request.prefix_ids)
        if drawn == 0 or self._by_position:
            return request.seed
        # the noise that chose the prefix must not be used again: given the prefix, it is not random
        return stable_hash(request.seed, drawn)

    def enter(self, request: Request) -> dict[str, list[int]]:
        """`extra_args` for a request that is submitted."""
        seed, length, key = self._kept.pop(request.id, (None, None, None))
        if key is None or (seed, length) != (request.seed, len(request.prefix_ids)):
            if key is not None:
                self._ended.append(key)
            key = next(self._keys)
        self._running[request.id] = key
        ended, self._ended = self._ended, []
        return {NOISE: [key, *ended]}

    def leave(self, request: Request, length: int | None) -> None:
        """Keep the noise of a request that may come back with `length` tokens; None: it ended."""
        key = self._running.pop(request.id)
        if length is None:
            self._ended.append(key)
        else:
            self._kept[request.id] = request.seed, length, key

    def forget(self) -> None:
        """Drop all kept keys: requests that come back are drawn by other weights."""
        self._ended += (key for *_, key in self._kept.values())
        self._kept.clear()


class KeptNoise:
    """Replaces `InputBatch.add_request` so that generators outlive their requests.

    When the model is split over processes, each of them draws every token and keeps the same
    generators.
    """

    def __init__(self, batch: Any) -> None:
        self.generators: dict[int, torch.Generator | None] = {}
        self._add_request = batch.add_request
        batch.add_request = self

    def __call__(self, state: Any) -> Any:
        """Called before the first draw of a request, and again after a preemption."""
        key, *ended = (state.sampling_params.extra_args or {}).get(NOISE, (None,))
        for old in ended:
            self.generators.pop(old, None)
        if key is not None:  # vLLM's own warm-up requests have none
            state.generator = self.generators.setdefault(key, state.generator)
        return self._add_request(state)
