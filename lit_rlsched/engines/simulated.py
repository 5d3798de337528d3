"""Simulates decoding: lengths come from a trace or a distribution, times from a cost model."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_rlsched.engines.base import SlotEngine, check_requests
from lit_rlsched.engines.spec import EngineSpec, EngineStats, Partial
from lit_rlsched.scheduling.noise import counter_uniform
from lit_rlsched.scheduling.recorded_lengths import LogNormalLengths, TraceLengths
from lit_rlsched.types import Event, FinishReason, LengthOnly, Request

Lengths = Callable[[Request], int] | Mapping[str, int] | Sequence[int] | str | Path


class SimulatedEngine(SlotEngine):
    """Event-driven engine on a virtual clock.

    One decode step takes `step_time_base + per_running * requests + per_kv_token * cached tokens`
    seconds, plus `per_prefill_token` for each prompt and prefix token of new requests. `step` jumps
    to the next step in which a request finishes or pauses. A completion, prefix included, is as
    long as `lengths` says and ends in EOS if the request's limit allows. Its other tokens and their
    log-probs are noise that depends only on the request's seed and the position.

    Args:
        lengths: A function from a request to the length of its completion, such as
            `LogNormalLengths` (the default), or a trace that `TraceLengths` accepts. A function
            with a method `token_ids(request)`, which returns a list, also gives tokens.
        step_time_base: Seconds of every step, to read the weights and launch kernels.
        per_running: Seconds per step for each running request.
        per_kv_token: Seconds per step for each token in the key-value cache.
        per_prefill_token: Seconds for each prompt or prefix token of a new request.
        length_only: Make up no tokens: events only carry their number (`LengthOnly`).
        stream: False reports a request only when it has finished, which is much faster with many
            slots; only `abort` returns the tokens of an aborted request then.
        max_jump: Maximum number of decode steps per `step`; 1 gives the events of a real engine.
        vocab_size: Made-up tokens are below it; by default the policy's, or 1000.
        kv_block: Tokens per block of key-value cache that callers see; None: not paged.
        kv_capacity: Tokens of key-value cache that callers see; None: no limit. The simulation
            itself never runs out of memory.

    Raises:
        UsageError: a negative cost, or a `max_jump`, `kv_block` or `kv_capacity` below 1.
    """

    version = 0
    """Policy version of the last weights."""
    logprobs = False
    virtual_clock = True

    def __init__(
        self,
        lengths: Lengths | None = None,
        step_time_base: float = 0.01,
        per_running: float = 5e-5,
        per_kv_token: float = 2e-8,
        per_prefill_token: float = 0.0,
        length_only: bool = False,
        stream: bool = True,
        max_jump: int | None = None,
        vocab_size: int | None = None,
        kv_block: int | None = 1,
        kv_capacity: int | None = None,
    ) -> None:
        if lengths is None:
            lengths = LogNormalLengths()
        self.length_of = lengths if callable(lengths) else TraceLengths(lengths)
        self.step_time_base, self.per_running = step_time_base, per_running
        self.per_kv_token, self.per_prefill_token = per_kv_token, per_prefill_token
        self.length_only, self.stream = length_only, stream
        self.max_jump, self.vocab_size = max_jump, vocab_size
        self.kv_block, self.kv_capacity = kv_block, kv_capacity

    def start(self, spec: EngineSpec) -> None:
        policy: Any = spec.policy
        vocab = policy.config.get_text_config().vocab_size if policy is not None else 1000
        vocab = self.vocab_size or vocab
        self._spec = spec
        self._words = np.setdiff1d(np.arange(vocab), spec.eos_token_ids)
        self._held: dict[str, _Live] = {}
        self._ends: list[tuple[int, int, _Live]] = []  # heap by last step; keeps aborted requests
        self._now = 0.0
        self._forget_counts()
        self._submitted = self._kv_tokens = self._new_tokens = self._step_kv_tokens = 0

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(self._spec, self._held, requests)
        for live in [self._draw(request) for request in requests]:  # `_draw` may raise
            self._held[live.request.id] = live
            self._submitted += 1
            last = live.start + len(live.token_ids)
            heapq.heappush(self._ends, (last, self._submitted, live))
            self._kv_tokens += live.context
            live.new = self.prefilled(live.request)
            self._new_tokens += live.new

    def prefilled(self, request: Request) -> int:
        """Return the tokens of a new request that its first step computes."""
        return len(request.prompt_ids) + len(request.prefix_ids)

    def step(self) -> list[Event]:
        return self.jump(self.steps_to_event())

    def steps_to_event(self) -> int:
        while self._ends:
            last, _, live = self._ends[0]
            if self._held.get(live.request.id) is live:
                steps = last - self._decode_steps
                return min(steps, self.max_jump or steps)
            heapq.heappop(self._ends)  # aborted
        return 0

    def seconds(self, steps: int) -> float:
        """Return how long the next decode steps take, if no request ends before the last."""
        running = len(self._held)
        # step i finds i more tokens of each request in the cache
        kv_tokens = steps * self._kv_tokens + running * (steps * (steps - 1) // 2)
        return (
            steps * (self.step_time_base + self.per_running * running)
            + self.per_kv_token * kv_tokens
            + self.per_prefill_token * self._new_tokens
        )

    def jump(self, steps: int) -> list[Event]:
        running = len(self._held)
        if not running:
            return []
        self._now += self.seconds(steps)
        self._prefill_tokens += self._new_tokens
        self._new_tokens = 0
        self._kv_tokens += steps * running
        self._step_kv_tokens = self._kv_tokens
        self._decode_steps += steps

        finished = []
        while self._ends and self._ends[0][0] == self._decode_steps:
            live = heapq.heappop(self._ends)[2]
            if self._held.get(live.request.id) is live:
                finished.append(live.event(self._decode_steps))
                self._drop(live)
        if not self.stream:
            return finished
        return finished + [live.event(self._decode_steps) for live in self._held.values()]

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        partials = {}
        for name in dict.fromkeys(request_ids):
            if live := self._held.get(name):
                self._drop(live)
                drawn = self._decode_steps - live.start
                partials[name] = Partial(live.token_ids[:drawn], live.logprobs[:drawn])
        return partials

    def sync_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        self._refuse_when_running("load weights")
        self.version = version

    def stats(self) -> EngineStats:
        return self._stats(self._kv_tokens, len(self._held), step_kv_tokens=self._step_kv_tokens)

    def now(self) -> float:
        return self._now

    def wait_until(self, now: float) -> None:
        self._now = max(self._now, now)

    def close(self) -> None:
        self._held, self._ends = {}, []

    def _draw(self, request: Request) -> "_Live":
        """Make up the whole completion, or look up the recorded one."""
        prefix, limit = len(request.prefix_ids), request.limit
        total = max(self.length_of(request), prefix + 1)  # a resumed request draws at least one
        context = len(request.prompt_ids) + prefix
        if self.length_only:
            drawn: Any = LengthOnly(min(total, limit) - prefix)
            return _Live(request, self._decode_steps, context, drawn, drawn, total <= limit)
        noise = counter_uniform(request.seed % 2**64, np.arange(prefix, min(total, limit)))
        stops = total <= limit
        if hasattr(self.length_of, "token_ids"):
            token_ids = np.asarray(self.length_of.token_ids(request))[prefix:limit]
            if total == request.sampling.max_completion_length:  # the recording may have cut it
                stops = stops and token_ids[-1] in self._spec.eos_token_ids
        else:
            token_ids = self._words[(noise * len(self._words)).astype(np.int64)]
            if stops:
                token_ids[-1] = self._spec.eos_token_ids[0]
        logprobs = np.log1p(-noise).tolist()
        return _Live(request, self._decode_steps, context, token_ids.tolist(), logprobs, stops)

    def _drop(self, live: "_Live") -> None:
        del self._held[live.request.id]
        self._kv_tokens -= live.context + self._decode_steps - live.start
        if live.start == self._decode_steps:  # aborted before its first step
            self._new_tokens -= live.new


@dataclass(slots=True)
class _Live:
    """A running request with its whole completion."""

    request: Request
    start: int
    """Number of the decode step before its first."""
    context: int
    """Tokens of prompt and prefix."""
    token_ids: list[int]
    logprobs: list[float]
    stops: bool
    reported: int = 0
    """Tokens that events have reported."""
    new: int = 0
    """Tokens that its first step computes."""

    def event(self, step: int) -> Event:
        new = slice(self.reported, step - self.start)
        self.reported = new.stop
        reason: FinishReason | None = None
        if new.stop == len(self.token_ids):
            reason = "stop" if self.stops else "length"
        return Event(self.request.id, self.token_ids[new], self.logprobs[new], reason)
