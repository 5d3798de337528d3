"""Completions of an engine, and their log-probs by the trainer's model."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_check.setting import Setting
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.policy import load_policy, load_tokenizer, named_weights
from lit_rlsched.types import Completion, Request, Sampling

Drawn = dict[str, Completion]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def policy_on(setting: Setting, model: str) -> Any:
    """Load the trainer's model in fp32."""
    policy: Any = load_policy(model)
    return policy.to(setting.device)


def prompts(model: str, count: int) -> list[list[int]]:
    """Return token ids of different prompts, in the chat template if there is one."""
    tokenizer = load_tokenizer(model)
    made = []
    for i in range(count):
        text = f"Use {3 + i % 7}, {5 + i % 11} and {8 + i % 13} to make {10 + i}."
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            encoded = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True
            )
            made.append(list(encoded["input_ids"]))
        else:
            made.append(list(tokenizer(text)["input_ids"]))
    return made


def requests(
    prompts: Sequence[Sequence[int]], tokens: int, pause_at: int | None = None
) -> list[Request]:
    """Return a request for each prompt with this limit; its seed is its index."""
    sampling = Sampling(tokens)
    return [Request(f"r{i}", p, i, sampling, (), pause_at) for i, p in enumerate(prompts)]


def draw(engine: RolloutEngine, batch: Sequence[Request]) -> Drawn:
    """Decode the requests to their ends."""
    drawn = {request.id: Completion(i) for i, request in enumerate(batch)}
    engine.submit(batch)
    while any(c.finish_reason is None for c in drawn.values()):
        for event in engine.step():
            drawn[event.request_id].take(event, 0)
    return drawn


def tokens_of(drawn: Drawn) -> list[list[int]]:
    """Return the completions in the order of their requests."""
    return [list(completion.token_ids) for completion in drawn.values()]


def sync(engine: RolloutEngine, policy: nn.Module, version: int = 0) -> float:
    """Load the policy's weights into the engine and return the seconds."""
    began = time.perf_counter()
    engine.sync_weights(named_weights(policy), version)
    return time.perf_counter() - began


def precision_of(dtype: torch.dtype, device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return the trainer's precision for an engine in `dtype`: autocast, as with `bf16-mixed`."""
    if dtype == torch.float32:
        return nullcontext
    return lambda: torch.autocast(device, dtype)


@torch.no_grad()
def gap(
    policy: nn.Module,
    prompts: Sequence[Sequence[int]],
    drawn: Drawn,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Return absolute differences `[N]` of engine's and trainer's log-probs for all tokens."""
    device, differences = next(policy.parameters()).device, []
    for prompt, completion in zip(prompts, drawn.values(), strict=True):
        with context():
            logp, _ = completion_logprobs(
                policy,
                torch.tensor([[*prompt, *completion.token_ids]], device=device),
                torch.tensor([len(prompt)], device=device),
                torch.tensor([len(completion.token_ids)], device=device),
            )
        theirs = torch.tensor(completion.logprobs)
        differences.append((logp[0].float().cpu() - theirs).abs())
    return torch.cat(differences)


def spec_of(
    model: str, device: str, dtype: torch.dtype, slots: int, context: int, policy: Any = None
) -> EngineSpec:
    """Return the spec of an engine in which completions end only at their limit."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return EngineSpec(model, slots, context, (), dtype, where, policy)


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    same = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        same += 1
    return same
