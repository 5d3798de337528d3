"""Your own engine: the contract of `RolloutEngine` in one small class.

It decodes with the trainer's own model and without a key-value cache: each step computes all tokens
of all running requests again. That is slow, but all there is to get right is here.

    lit-rlsched fit -c configs/quickstart.yaml --data.engine=examples.own_engine.PlainEngine

After each weight sync the run checks that the engine's log-probs are the trainer's. The tests of
`tests/engines/test_contract.py` run with this engine, too; add yours there.
"""

from dataclasses import dataclass, field

import torch

from lit_rlsched.engines.base import RolloutEngine, check_requests
from lit_rlsched.engines.sampling import counter_uniform, draw
from lit_rlsched.engines.spec import EngineStats, Partial
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, FinishReason, Request


@dataclass
class Running:
    """A request and what it has drawn."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """Its prompt and its completion so far."""
        return [*self.request.prompt_ids, *self.request.prefix_ids, *self.token_ids]

    @property
    def length(self) -> int:
        """Number of tokens of its completion so far; a resumed one begins with a prefix."""
        return len(self.request.prefix_ids) + len(self.token_ids)


class PlainEngine(RolloutEngine):
    """Decode with the trainer's model, without a key-value cache."""

    def start(self, spec):
        """Take the model of the run; `spec` also has its limits and end-of-sequence tokens."""
        if spec.policy is None:
            raise UsageError("`PlainEngine` needs the trainer's model: leave `ProcessEngine` out.")
        self.spec = spec
        self.running = {}  # by request id
        self.decode_steps = self.computed_tokens = 0

    def submit(self, requests):
        """Take all requests or, if one of them cannot be decoded, none."""
        check_requests(self.spec, self.running, requests, self.spec.policy.config.vocab_size)
        self.running |= {request.id: Running(request) for request in requests}

    @torch.no_grad()
    def step(self):
        """Draw one token of each running request."""
        if not self.running:
            return []
        rows = list(self.running.values())
        tokens, logprobs = self._draw(rows)
        self.decode_steps += 1
        return [self._take(*drawn) for drawn in zip(rows, tokens, logprobs, strict=True)]

    def _draw(self, rows):
        def column(values):
            return torch.tensor(list(values), device=self.spec.device)

        # The model is causal, so padding on the right needs no mask.
        contexts = [column(row.context) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(contexts, batch_first=True)
        last = [len(context) - 1 for context in contexts]
        logits = self.spec.policy(padded).logits[range(len(rows)), last].float()
        self.computed_tokens += sum(map(len, contexts))
        # The noise is a function of the request's seed and the position in the completion. So a
        # request draws the same tokens, whatever runs beside it and wherever it was paused.
        seeds = column(row.request.seed for row in rows)
        noise = counter_uniform(seeds, column(row.length for row in rows))
        names = ("temperature", "top_k", "top_p", "min_p")
        rules = {n: column(getattr(row.request.sampling, n) for row in rows) for n in names}
        tokens, logprobs = draw(logits, noise, **rules)
        return tokens.tolist(), logprobs.tolist()

    def _take(self, row, token, logprob):
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        reason: FinishReason | None = None
        if token in self.spec.eos_token_ids:
            reason = "stop"
        elif row.length == row.request.limit:
            reason = "length"  # of the completion, or where the request asks for a pause
        if reason:
            del self.running[row.request.id]
        return Event(row.request.id, [token], [logprob], reason)

    def abort(self, request_ids):
        """Drop requests, and return what they had drawn."""
        rows = {name: self.running.pop(name) for name in {*request_ids} & self.running.keys()}
        return {name: Partial(row.token_ids, row.logprobs) for name, row in rows.items()}

    def sync_weights(self, named_tensors, version):
        """Do nothing: the engine decodes with the trained model itself."""
        if self.running:
            raise RuntimeError("Abort the running requests before a weight sync.")

    def stats(self):
        """Count the tokens in use, and what was computed since the start."""
        held = sum(len(row.context) for row in self.running.values())
        return EngineStats(
            running=len(self.running),
            waiting=0,
            kv_tokens=held,
            decode_steps=self.decode_steps,
            prefill_tokens=self.computed_tokens,
        )

    def close(self):
        """Forget everything."""
        self.running = {}
