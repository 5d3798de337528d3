"""A chat model whose turns are given: an engine that says what a script says."""

from dataclasses import dataclass, field
from typing import Any

import torch
from tool_families import small_model, tokenizer_of

from lit_rlsched.engines.base import RolloutEngine, check_requests
from lit_rlsched.engines.spec import EngineStats, Partial
from lit_rlsched.types import Event


def chat_model(folder):
    """Save a random model with the chat template of Qwen 2.5; return its folder."""
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.pad_token = "<|eot_id|>"
    torch.manual_seed(0)
    model = small_model(tokenizer)
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass
class _Row:
    request: Any
    script: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class SaidTurns(RolloutEngine):
    """Draws given turns: `script(prompt, index)` are those of a completion, without end tokens.

    Log-probs are those of the policy, so what it draws can be trained on.
    """

    def __init__(self, tokenizer, script):
        self._tokenizer, self._script = tokenizer, script

    def start(self, spec):
        self._spec, self._running, self._steps = spec, {}, 0

    def submit(self, requests):
        check_requests(self._spec, self._running, requests)
        for request in requests:
            self._running[request.id] = _Row(request, self._turn(request))

    def _turn(self, request):
        end, prefix = self._tokenizer.eos_token_id, [*request.prefix_ids]
        # each turn and each reply has an end
        turn = prefix.count(end) // 2
        given = self._script(
            self._tokenizer.decode(request.prompt_ids), int(request.id.rpartition("/")[2])
        )
        text = given[turn] if turn < len(given) else ""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], end]

    @torch.no_grad()
    def step(self):
        events = []
        for row in [*self._running.values()]:
            request = row.request
            ids = [*request.prompt_ids, *request.prefix_ids, *row.script]
            logits = self._spec.policy(torch.tensor([ids])).logits[0].float()
            room = request.limit - len(request.prefix_ids)
            drawn = row.script[:room]  # a whole turn in a step
            first = len(ids) - len(row.script)
            logp = torch.log_softmax(logits[first - 1 : first - 1 + len(drawn)], -1)
            row.logprobs = logp.gather(1, torch.tensor(drawn)[:, None]).flatten().tolist()
            row.token_ids = drawn
            del self._running[request.id]
            ended = drawn[-1] in self._spec.eos_token_ids
            events.append(Event(request.id, drawn, row.logprobs, "stop" if ended else "length"))
        self._steps += 1
        return events

    def abort(self, ids):
        rows = {n: self._running.pop(n) for n in {*ids} & self._running.keys()}
        return {n: Partial(r.token_ids, r.logprobs) for n, r in rows.items()}

    def sync_weights(self, weights, version):
        pass

    def stats(self):
        return EngineStats(
            running=len(self._running),
            waiting=0,
            kv_tokens=0,
            decode_steps=self._steps,
            prefill_tokens=0,
        )

    def close(self):
        self._running = {}
