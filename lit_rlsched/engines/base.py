"""The contract between the rollout core and whatever decodes tokens."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lit_rlsched.engines.footprint import Footprint, Sizes
from lit_rlsched.engines.rollout_worker import RolloutWorker, Worker
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.micro_group_sampling import DEFAULT_SLOTS, KVCache
from lit_rlsched.types import Event, Request

if TYPE_CHECKING:
    import torch


class EngineBroken(RuntimeError):
    """An engine has lost a part of itself; what it held is lost, and only a new start helps."""


class EngineDied(RuntimeError):
    """The engine's process is gone; what it held is lost, and a new one has taken its place."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine needs to know of the run; handed over once, by the data module."""

    model: str
    """Folder or hub name of the checkpoint the policy was loaded from."""
    slots: int
    """Most requests that are ever inside the engine at once."""
    max_model_len: int
    """Prompt plus completion, in tokens."""
    eos_token_ids: tuple[int, ...]
    """Every token that ends a completion."""
    dtype: "torch.dtype" = field(default_factory=lambda: _torch().float32)
    device: "torch.device" = field(default_factory=lambda: _torch().device("cpu"))
    policy: "torch.nn.Module | None" = None
    """The trainer's own Hugging Face model: an engine that decodes with it holds no second copy."""
    seed: int = 0
    kv_cache_bytes: int | None = None
    """Most memory for the key-value cache, where the run has a budget for it."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds right now, and what it has counted since `start`."""

    running: int
    waiting: int
    kv_tokens: int
    """Tokens of key-value cache in use; a prefix that the engine shares counts once."""
    step_kv_tokens: int | None = None
    """The most in use during the last step, where that is more: before finished requests left."""
    preemptions: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    """Prompt and prefix tokens that were computed, not read from a cache."""
    cached_tokens: int = 0
    """Prompt and prefix tokens that were read from a cache."""


@dataclass(frozen=True, slots=True)
class Partial:
    """What an aborted request had drawn since it was submitted."""

    token_ids: list[int]
    logprobs: list[float]


class RolloutEngine(ABC):
    """Decodes requests step by step and keeps no policy of its own.

    The caller decides what runs: it never submits more than `slots` requests at once, and the
    engine never reorders, drops or delays one. Every completion depends on its own seed, not on its
    company, nor on where it was paused.

    An engine of your own inherits from this class.
    """

    logprobs = True
    """Whether events carry the policy's log-probs of their tokens. Where not, tokens of an earlier
    policy cannot be trained on."""
    tensor_parallel_size = 1
    """Devices of this node that the model is split over. An engine with
    `max_tensor_parallel_size` above 1 takes a new value at its next `start`."""
    ends_with_process = False
    """Whether the process ends after `close`, and with it all that the engine holds."""
    decodes_by_itself = False
    """Whether it goes on while the caller does something else, in a process of its own."""
    kv_block: int | None = None
    """Tokens of the smallest piece of key-value cache; `None` where the cache is not paged and
    every slot has room for a whole completion. The number may change in `start`."""
    kv_capacity: int | None = None
    """Tokens of key-value cache the engine has room for, once started; `None`: it grows."""

    def cache_dtype(self, spec: EngineSpec) -> "torch.dtype":
        """Precision that it computes in, key-value cache included; may be asked for before `start`.

        The check after a weight sync allows for its rounding, and where the engine is in another
        process, matrices are rounded to it on the way.
        """
        return spec.dtype

    def most_slots(self, spec: EngineSpec) -> int:
        """Requests it runs at once at most where nobody says; `spec` has no `slots` yet."""
        return DEFAULT_SLOTS

    def kv_cache(self, spec: EngineSpec, token_bytes: int) -> KVCache:
        """Its key-value cache, as far as it is known; `token_bytes` is what a token takes."""
        return KVCache(token_bytes, spec.max_model_len, self.kv_block, self.kv_capacity)

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """Most devices of this node that the model can be split over, a power of two.

        1 where the engine does not split it.
        """
        return 1

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """What it will hold; asked for before `start`, for an estimate."""
        dtype = self.cache_dtype(spec)
        how = f"{sizes.say_weights(dtype)}, if it has its own"
        weights, cache = sizes.parameters * dtype.itemsize, sizes.full_slots(spec)
        return Footprint(weights, cache, True, how, sizes.say_slots(spec))

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        """What `kv_capacity` will be once it has started with that; `None`: any number.

        Raises:
            ValueError: it is less than a completion may take.
        """
        return None

    @abstractmethod
    def start(self, spec: EngineSpec) -> None:
        """Build what is expensive. Called before anything else, and again only after `close`.

        All that `stats` counts begins at zero.
        """

    def make_worker(self, admission: Admission) -> Worker:
        """What keeps the slots of the started engine filled, next to it wherever it is."""
        return RolloutWorker(self, admission)

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests in.

        Raises:
            ValueError: a request does not fit the context, its id is already in use, or there are
                more than `slots` requests; the message names the request. Nothing of the call is
                taken in then.
        """

    @abstractmethod
    def step(self) -> list[Event]:
        """Advance by one decode step, or as far as the next event where the engine can jump.

        Raises:
            EngineBroken: a process of the engine is gone. `ProcessEngine` starts another engine.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        """Drop requests and free their memory; unknown ids are ignored."""

    @abstractmethod
    def sync_weights(
        self, named_tensors: Iterable[tuple[str, "torch.Tensor"]], version: int
    ) -> None:
        """Load the policy's weights, under their Hugging Face names, and forget cached prefixes.

        Raises:
            RuntimeError: requests are running: their caches belong to the old weights.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """What is running, waiting and in memory."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on the engine's clock: wall time, or virtual time in a simulation."""

    def sleep(self) -> None:  # noqa: B027
        """Give memory back to the trainer while nothing decodes, where the engine can."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`; weights must be synced before the next request."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice."""


def kv_bytes_per_token(config: Any, dtype: "torch.dtype") -> int:
    """Bytes of key-value cache a token takes in all layers of a plain attention model."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize


def _torch() -> Any:
    """Imported when it is needed: a simulation does without."""
    import torch

    return torch


def check_requests(
    spec: EngineSpec,
    live_ids: Collection[str],
    requests: Sequence[Request],
    vocab_size: int | None = None,
) -> None:
    """Check a whole `submit` call before any of it is taken in.

    Raises:
        ValueError: as `RolloutEngine.submit` says; the message names the request.
    """
    if len(live_ids) + len(requests) > spec.slots:
        first = requests[max(spec.slots - len(live_ids), 0)].id
        raise ValueError(
            f"request {first!r} finds no free slot: {len(live_ids)} running and {len(requests)} "
            f"submitted, but slots={spec.slots}"
        )
    seen: set[str] = set()
    for request in requests:
        if request.id in live_ids or request.id in seen:
            raise ValueError(f"request {request.id!r} is already in the engine")
        if why := _misfit(spec, request, vocab_size):
            raise ValueError(f"request {request.id!r} {why}")
        seen.add(request.id)


def _misfit(spec: EngineSpec, request: Request, vocab_size: int | None) -> str | None:
    """Why a request by itself cannot be decoded."""
    most, prompt = request.sampling.max_completion_length, len(request.prompt_ids)
    if prompt == 0:
        return "has an empty prompt"
    if prompt + most > spec.max_model_len:
        return (
            f"does not fit: {prompt} prompt tokens and max_completion_length={most} "
            f"exceed max_model_len={spec.max_model_len}"
        )
    if request.pause_at is not None and request.pause_at < 1:
        return f"has pause_at={request.pause_at}: it must be at least 1"
    if len(request.prefix_ids) >= request.limit:
        bound = "max_completion_length" if request.limit == most else "pause_at"
        return (
            f"has a prefix of {len(request.prefix_ids)} tokens, which leaves nothing to draw: "
            f"{bound}={request.limit}"
        )
    if vocab_size is not None:
        tokens = [*request.prompt_ids, *request.prefix_ids]
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            return f"has tokens outside the vocabulary of {vocab_size}"
    return None
