"""Decodes with the trainer's own Hugging Face model: no second copy and no weight sync."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_rlsched.engines.base import SlotEngine, check_requests
from lit_rlsched.engines.sampling import counter_uniform, draw
from lit_rlsched.engines.slot_cache import SlotCache, check_full_attention, grouped_attention
from lit_rlsched.engines.spec import EngineSpec, EngineStats, Footprint, Partial, Sizes, Weights
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, FinishReason, Request, no_floats, no_ids

PREFILL_TOKENS = 16_384
"""Maximum tokens of a prefill pass, padding included; one longer prompt still runs alone."""
INTEGERS = ("token", "position", "seed", "drawn", "limit")
RULES = ("temperature", "top_k", "top_p", "min_p")


class TransformersEngine(SlotEngine):
    """Decodes step by step, with a slot and key-value cache for every running request.

    Decodes with `spec.policy` itself, so a weight sync costs nothing; without a policy it loads
    `spec.model`. The draw of a token depends on its request's seed and its position in the
    completion: a request that is resumed with the same seed and weights continues as if it had
    never been interrupted. The cache is not paged, and `spec.kv_cache_bytes` is ignored: the caller
    limits memory by the number of slots.

    Raises:
        UsageError: in `start`, for a model with sliding-window, recurrent or hybrid layers.
    """

    version = 0
    """Policy version of the last weights."""

    def cache_dtype(self, spec: EngineSpec) -> torch.dtype:
        return spec.dtype if spec.policy is None else next(spec.policy.parameters()).dtype

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """Full slots, and weights only if the engine does not decode with the trainer's model."""
        own = spec.policy is None
        weights = sizes.parameters * spec.dtype.itemsize if own else 0
        how = sizes.say_weights(spec.dtype) if own else ""
        return Footprint(weights, sizes.full_slots(spec), own, how, sizes.say_slots(spec))

    def start(self, spec: EngineSpec) -> None:
        policy: Any = spec.policy
        if policy is None:
            policy = AutoModelForCausalLM.from_pretrained(spec.model, dtype=spec.dtype)
            policy.to(spec.device).requires_grad_(False)
        self._spec, self._policy = spec, policy
        self._config = policy.config.get_text_config()
        check_full_attention(policy, spec.max_model_len)
        self._modules = list(policy.modules())
        parameter = next(policy.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        if self._device.type == "mps":
            raise UsageError(
                "TransformersEngine samples in float64, which MPS devices do not support. Train "
                "with `Trainer(accelerator='cpu')`."
            )
        self._eos = torch.tensor(spec.eos_token_ids, device=self._device)
        self._cache = SlotCache(spec.slots, spec.max_model_len)
        self._held: list[_Row] = []  # row i is in slot i, so the first slots are in use
        # one column per slot, with the rows INTEGERS and RULES; `token` is fed next, at `position`
        self._integers = torch.zeros(len(INTEGERS), spec.slots, dtype=torch.int64).to(self._device)
        self._rules = torch.zeros(len(RULES), spec.slots, dtype=torch.float64).to(self._device)
        self._forget_counts()

    def submit(self, requests: Sequence[Request]) -> None:
        live_ids = {row.id for row in self._held}
        check_requests(self._spec, live_ids, requests, self._config.vocab_size)
        rows = [_Row(r.id, [*r.prompt_ids, *r.prefix_ids]) for r in requests]
        if not rows:
            return
        integers = [
            [row.context[-1] for row in rows],
            [len(row.context) - 1 for row in rows],
            [(r.seed + 2**63) % 2**64 - 2**63 for r in requests],
            [len(r.prefix_ids) for r in requests],
            [r.limit for r in requests],
        ]
        rules = [[getattr(r.sampling, name) for r in requests] for name in RULES]
        slots = slice(len(self._held), len(self._held) + len(rows))
        self._integers[:, slots] = torch.tensor(integers, device=self._device)
        self._rules[:, slots] = torch.tensor(rules, dtype=torch.float64, device=self._device)
        self._prefill(rows)
        self._held += rows

    def step(self) -> list[Event]:
        if not self._held:
            return []
        token, position, seed, drawn, limit = self._integers[:, : len(self._held)]
        rules = dict(zip(RULES, self._rules[:, : len(self._held)], strict=True))
        noise = counter_uniform(seed, drawn)  # on the host, so before the GPU is busy
        logits = self._decode(token, position)
        tokens, logprobs = draw(logits, noise, **rules)
        token.copy_(tokens)
        position += 1
        drawn += 1
        self._decode_steps += 1
        stopped = torch.isin(tokens, self._eos).tolist()
        full = (drawn >= limit).tolist()
        events = []
        for row, new, logprob, stop, length in zip(
            self._held, tokens.tolist(), logprobs.tolist(), stopped, full, strict=True
        ):
            reason: FinishReason | None = "stop" if stop else "length" if length else None
            events.append(Event(row.id, [new], [logprob], reason))
            row.token_ids.append(new)
            row.logprobs.append(logprob)
        self._free([i for i, event in enumerate(events) if event.finish_reason])
        return events

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        ids = set(request_ids)
        dropped = [i for i, row in enumerate(self._held) if row.id in ids]
        rows = [self._held[i] for i in dropped]
        self._free(dropped)
        return {row.id: Partial(row.token_ids, row.logprobs) for row in rows}

    def sync_weights(self, named_tensors: Weights, version: int) -> None:
        self._refuse_when_running("load weights")
        if self._spec.policy is None:
            own = self._policy.state_dict()
            for name, tensor in named_tensors:
                own[name].copy_(tensor)
        self.version = version

    def stats(self) -> EngineStats:
        return self._stats(sum(map(len, self._held)), len(self._held))

    def sleep(self) -> None:
        """Drop the cache, which grows again with the next requests."""
        self._refuse_when_running("sleep")
        self._cache = SlotCache(self._spec.slots, self._spec.max_model_len)

    def close(self) -> None:
        self._held = []
        self._policy, self._modules = None, []
        self._cache = SlotCache(0, 0)

    def _prefill(self, rows: list["_Row"]) -> None:
        """Compute the cache of new rows, except for the last token of each context.

        A context that several requests share is computed once, or copied from a running request.
        """
        slots: dict[bytes, list[int]] = {}
        contexts: dict[bytes, list[int]] = {}
        for slot, row in enumerate(rows, start=len(self._held)):
            slots.setdefault(row.key, []).append(slot)
            contexts[row.key] = row.context[:-1]
        self._prefill_tokens += len(rows)  # the last tokens, which the first decode step feeds
        running = {row.key: slot for slot, row in enumerate(self._held) if row.key}
        new = []
        for key, context in contexts.items():
            targets = slots[key]
            self._cached_tokens += len(targets) * len(context)
            if key in running:
                self._cache.copy([running[key]] * len(targets), targets, len(context))
            elif context:
                self._cached_tokens -= len(context)
                self._prefill_tokens += len(context)
                new.append(key)
        lengths = {key: len(contexts[key]) for key in new}
        for part in _split(sorted(new, key=len), lengths):
            width = len(contexts[part[-1]])
            ids = [contexts[key] + [0] * (width - len(contexts[key])) for key in part]
            self._cache.prefill([slots[key] for key in part], width)
            # no mask: a causal model does not see the padding, which is on the right
            positions = torch.arange(width, device=self._device)[None]
            self._forward(torch.tensor(ids, device=self._device), positions)

    def _decode(self, token: Tensor, position: Tensor) -> Tensor:
        """Feed the next tokens, `[B]`, and return the logits after each, `[B, V]`."""
        length = int(position.max()) + 1
        self._cache.decode(position, length)
        ahead = torch.arange(length, device=self._device) > position[:, None, None, None]
        # additive, as not every attention takes a boolean mask
        mask = torch.zeros_like(ahead, dtype=self._dtype)
        mask.masked_fill_(ahead, torch.finfo(self._dtype).min)
        with grouped_attention(self._config):
            logits = self._forward(token[:, None], position[:, None], mask)[:, 0]
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        # no dropout; module by module, as some may be in eval mode; `Module.__setattr__` is slow
        training = [vars(module) for module in self._modules if module.training]
        for attributes in training:
            attributes["training"] = False
        try:
            output = self._policy(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            for attributes in training:
                attributes["training"] = True
        return output.logits

    def _free(self, dropped: list[int]) -> None:
        """Free slots; rows from the end move into the gaps."""
        left = len(self._held) - len(dropped)
        holes = [slot for slot in dropped if slot < left]
        movers = sorted(set(range(left, len(self._held))) - set(dropped))
        if holes:
            self._cache.copy(movers, holes, max(len(self._held[i]) for i in movers))
            self._integers[:, holes] = self._integers[:, movers]
            self._rules[:, holes] = self._rules[:, movers]
            for hole, mover in zip(holes, movers, strict=True):
                self._held[hole] = self._held[mover]
        del self._held[left:]


@dataclass(slots=True)
class _Row:
    """A running request."""

    id: str
    context: list[int]
    """Prompt and prefix."""
    token_ids: "array[int]" = field(default_factory=no_ids)
    logprobs: "array[float]" = field(default_factory=no_floats)
    key: bytes = b""
    """The context without its last token, to find shared contexts; bytes cache their hash. Empty
    if older weights computed it."""

    def __post_init__(self) -> None:
        self.key = array("q", self.context[:-1]).tobytes()

    def __len__(self) -> int:
        return len(self.context) + len(self.token_ids)


def _split(keys: Sequence[bytes], sizes: Mapping[bytes, int]) -> Iterator[list[bytes]]:
    """Split contexts, sorted by size, into passes whose rows have as many times the largest."""
    part: list[bytes] = []
    for key in keys:
        if part and (len(part) + 1) * sizes[key] > PREFILL_TOKENS:
            yield part
            part = []
        part.append(key)
    if part:
        yield part
