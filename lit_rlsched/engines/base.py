"""The contract between the rollout loop and the engines that decode tokens."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, TypeVar

from lit_rlsched.engines.devices import check_devices
from lit_rlsched.engines.rollout_worker import EngineWorker, Worker
from lit_rlsched.engines.spec import EngineSpec, EngineStats, Footprint, Partial, Sizes, Weights
from lit_rlsched.scheduling.admission import DEFAULT_SLOTS, Admission, KVCache
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.settings import RemembersInit, UsageError
from lit_rlsched.types import Event, Request

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class RolloutEngine(RemembersInit, ABC):
    """Decodes requests step by step.

    The caller decides what runs: it never submits more than `slots` requests at once, and the
    engine never reorders, drops or delays a request. A completion depends on its request's seed,
    not on the other requests and not on where it was paused.
    """

    logprobs = True
    """Whether events carry the policy's log-probs. Without them, tokens of an earlier policy
    version cannot be trained on."""
    tensor_parallel_size = 1
    """Number of this node's devices that the model is split over. An engine with
    `max_tensor_parallel_size` above 1 takes a new value at its next `start`."""
    enable_lora = False
    """Whether the engine loads the base model itself and `sync_weights` takes the policy's LoRA
    adapters alone (`training.policy.named_adapters`)."""
    weight_transfer: str | None = None
    """`nccl` if weights go from GPU to GPU; see `ProcessEngine`."""
    ends_with_process = False
    """Whether the process ends after `close` and frees everything the engine holds."""
    decodes_by_itself = False
    """Whether it keeps decoding, in another process, while the caller does something else."""
    kv_block: int | None = None
    """Tokens per block of key-value cache; `None`: the cache is not paged, and every slot has room
    for a whole completion. `start` may change it."""
    kv_capacity: int | None = None
    """Tokens of key-value cache the started engine has room for; `None`: the cache grows."""
    virtual_clock = False
    """Whether `now` advances only with the engine's steps."""
    clock_offset = 0.0
    """Seconds by which the trainer's `time.monotonic` is ahead of this process's."""

    @property
    def engines(self) -> "Sequence[RolloutEngine]":
        """The engines that decode: this one, or those of an `EnginePool`."""
        return (self,)

    @property
    def name(self) -> str:
        """Name of the class that decodes, for messages."""
        return type(self).__name__

    def each(self, call: "Callable[[RolloutEngine], T]") -> list[T]:
        """Call a function with each of `engines`, and return the results in their order."""
        return [call(engine) for engine in self.engines]

    def cache_dtype(self, spec: EngineSpec) -> "torch.dtype":
        """Precision that the engine computes in, including its cache; known before `start`.

        The check after a weight sync allows for its rounding, and weights for an engine in another
        process are rounded to it first.
        """
        return spec.dtype

    def most_slots(self, spec: EngineSpec) -> int:
        """Default maximum of requests at once; `spec.slots` is not set yet."""
        return DEFAULT_SLOTS

    def kv_cache(self, spec: EngineSpec, token_bytes: int) -> KVCache:
        """The known part of the engine's key-value cache; a token takes `token_bytes`."""
        return KVCache(token_bytes, spec.max_model_len, self.kv_block, self.kv_capacity)

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """Largest power of two of this node's devices the model can be split over; 1: no split."""
        return 1

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """Estimate the engine's memory before `start`."""
        dtype = self.cache_dtype(spec)
        how = f"{sizes.say_weights(dtype)}, if the engine has its own"
        weights, cache = sizes.parameters * dtype.itemsize, sizes.full_slots(spec)
        return Footprint(weights, cache, True, how, sizes.say_slots(spec))

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        """Estimate `kv_capacity` from the footprint; `None`: no limit.

        Raises:
            UsageError: the cache cannot hold one prompt with its completion.
        """
        return None

    @abstractmethod
    def start(self, spec: EngineSpec) -> None:
        """Build the engine and reset its counters; called first, and again only after `close`."""

    def reserve(self, spec: EngineSpec, engines: "Sequence[RolloutEngine]") -> None:
        """Claim devices for `engines` before they start; they are equal, and this is the first.

        Raises:
            UsageError: there are not enough.
        """
        if spec.device is not None:
            check_devices(spec, self.tensor_parallel_size)

    def make_worker(self, admission: Admission) -> Worker:
        """Return a worker that keeps the slots of the started engine filled.

        Args:
            admission: Decides which waiting request takes a free slot; new, for one engine.
        """
        return RolloutWorker(self, admission)

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Take all of these requests, or none.

        Raises:
            UsageError: a request does not fit the context, its id is already in use, or there are
                more than `slots` requests; the message names the request.
        """

    @abstractmethod
    def step(self) -> list[Event]:
        """Advance by one decode step, or to the next event if the engine can skip steps.

        Raises:
            EngineBroken: a process of the engine has died. `ProcessEngine` starts a new engine.
        """

    def steps_to_event(self) -> int:
        """Number of decode steps to the next event, if the engine can skip those before; else 1."""
        return 1

    def jump(self, steps: int) -> list[Event]:
        """Advance by `steps` decode steps, at most `steps_to_event`."""
        return self.step()

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        """Drop requests and free their memory; unknown ids are ignored."""

    def hand_over(self, named_tensors: Weights) -> Weights:
        """Return the weights in a form that `sync_weights` of several engines can read."""
        return [*named_tensors]

    @abstractmethod
    def sync_weights(self, named_tensors: Weights, version: int) -> None:
        """Load the policy's weights, under their Hugging Face names, and drop cached prefixes.

        Raises:
            RuntimeError: requests are running, whose caches belong to the old weights.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """What the engine holds, and its counters."""

    def now(self) -> float:
        """Seconds of the trainer's `time.monotonic`, or virtual time in a simulation."""
        return time.monotonic() + self.clock_offset

    def wait_until(self, now: float) -> None:
        """Let a `virtual_clock` advance to `now` without a step; other clocks do so themselves."""

    def sleep(self) -> None:
        """Release memory for the trainer while nothing decodes, if the engine can."""

    def wake(self) -> None:
        """Undo `sleep`; weights must be synced before the next request."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice."""


class RolloutWorker(EngineWorker):
    """Worker of a started engine in the same process."""

    def __init__(self, engine: RolloutEngine, admission: Admission) -> None:
        super().__init__(admission)
        self.engine = engine
        self._requests: dict[str, Request] = {}
        self._drawn: dict[str, int] = {}
        self.running = self._drawn.keys()
        self._stats = engine.stats()
        self._begun: tuple[float, list[str]] | None = None
        """Start of the next step, and the requests that were admitted for it."""
        self._version = 0

    @property
    def busy(self) -> bool:
        return bool(self._drawn) or len(self.admission) > 0

    def start_trace(self) -> RolloutTrace:
        trace = super().start_trace()
        self._stats = self.engine.stats()
        return trace

    def start_round(self, ahead: bool, version: int = 0) -> None:
        self._version = version

    def submit(self, requests: Iterable[Request]) -> None:
        self.admission.push(requests)

    def begin(self) -> int:
        self._refill()
        return self.engine.steps_to_event()

    def _refill(self) -> tuple[float, list[str]]:
        if self._begun is None:
            admitted = self.admission.pop(self._drawn, self._stats.kv_tokens)
            start = self.engine.now()
            if admitted:
                self.engine.submit(admitted)
                for request in admitted:
                    self._requests[request.id], self._drawn[request.id] = request, 0
            self._begun = start, [request.id for request in admitted]
        return self._begun

    def advance(self, most: int | None = None) -> Step:
        engine, before = self.engine, self._stats
        start, admitted = self._refill()
        self._begun = None
        running = len(self._drawn)
        events = engine.step() if most is None else engine.jump(most)
        end = engine.now()
        self._stats = after = engine.stats()
        left, drawn, version = {}, self._drawn, self._version
        for event in events:  # hot loop: one pass per drawn token
            event.version = version
            drawn[event.request_id] += len(event.token_ids)
            if event.finish_reason is not None:
                request = self._requests.pop(event.request_id)
                left[request.id] = new = drawn.pop(request.id)
                total = len(request.prefix_ids) + new
                paused = total < request.sampling.max_completion_length
                if event.finish_reason == "length" and paused:
                    event.finish_reason = "paused"
        return Step(
            start,
            end,
            running,
            after.step_kv_tokens or after.kv_tokens,
            after.decode_steps - before.decode_steps,
            after.prefill_tokens - before.prefill_tokens,
            after.cached_tokens - before.cached_tokens,
            after.preemptions - before.preemptions,
            admitted,
            events,
            left,
        )

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        if request_ids is None:
            self.admission.clear()
            running = list(self._drawn)
        else:
            self.admission.discard(request_ids)
            running = [i for i in request_ids if i in self._drawn]
        if self._begun is not None:
            start, admitted = self._begun
            rest = [name for name in admitted if name not in running]
            self._begun = None if request_ids is None else (start, rest)
        unreported: list[Event] = []
        partials = self.engine.abort(running)
        for name in running:
            reported, partial = self._drawn.pop(name), partials[name]
            del self._requests[name]
            if new := partial.token_ids[reported:]:
                event = Event(name, new, partial.logprobs[reported:])
                event.version = self._version
                unreported.append(event)
            self.trace.left(name, self.engine.now(), len(partial.token_ids))
        self._stats = self.engine.stats()  # aborted requests have freed their cache
        return unreported


class SlotEngine(RolloutEngine):
    """Base of the engines of this package that decode in this process: what they all count."""

    _held: Sized
    """What each running request holds."""

    def _forget_counts(self) -> None:
        self._preemptions = self._decode_steps = self._prefill_tokens = self._cached_tokens = 0

    def _stats(
        self, kv_tokens: int, running: int, waiting: int = 0, step_kv_tokens: int | None = None
    ) -> EngineStats:
        counts = self._preemptions, self._decode_steps, self._prefill_tokens, self._cached_tokens
        return EngineStats(running, waiting, kv_tokens, step_kv_tokens, *counts)

    def _refuse_when_running(self, what: str) -> None:
        if self._held:
            raise RuntimeError(f"Cannot {what} while {len(self._held)} requests are running.")


def check_requests(
    spec: EngineSpec,
    live_ids: Collection[str],
    requests: Sequence[Request],
    vocab_size: int | None = None,
) -> None:
    """Check all requests of a `submit` call before the engine takes any."""
    if len(live_ids) + len(requests) > spec.slots:
        first = requests[max(spec.slots - len(live_ids), 0)].id
        raise UsageError(
            f"request {first!r} has no free slot: {len(live_ids)} running and {len(requests)} "
            f"submitted, but slots={spec.slots}"
        )
    seen: set[str] = set()
    for request in requests:
        if request.id in live_ids or request.id in seen:
            raise UsageError(f"request {request.id!r} is already in the engine")
        seen.add(request.id)
        most, prompt = request.sampling.max_completion_length, len(request.prompt_ids)
        why = ""
        if prompt == 0:
            why = "has an empty prompt"
        elif prompt + most > spec.max_model_len:
            why = (
                f"does not fit: {prompt} prompt tokens and max_completion_length={most} "
                f"exceed max_model_len={spec.max_model_len}"
            )
        elif len(request.prefix_ids) >= request.limit:
            bound = "max_completion_length" if request.limit == most else "pause_at"
            why = (
                f"has a prefix of {len(request.prefix_ids)} tokens, which leaves nothing to draw: "
                f"{bound}={request.limit}"
            )
        elif vocab_size is not None:
            tokens = [*request.prompt_ids, *request.prefix_ids]
            if min(tokens) < 0 or max(tokens) >= vocab_size:
                why = f"has tokens outside the vocabulary of {vocab_size}"
        if why:
            raise UsageError(f"request {request.id!r} {why}")
