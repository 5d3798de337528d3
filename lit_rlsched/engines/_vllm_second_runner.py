"""Lets vLLM's second model runner verify draft tokens: several positions of a row in one step.

The second runner (`vllm.v1.worker.gpu`) is the default of vLLM's builds for CUDA. It takes the
number of draft tokens from the scheduler and the tokens from `req_states.draft_tokens`, and without
a `speculative_config` it draws each row of logits with its plain sampler, with noise hashed from
the request's seed and the row's position. So a row after draft tokens is drawn as in a step of its
own, and there is no generator to put back. This module adds the rest: the tensor of draft tokens,
the number of rows per request, and the choice of the draws to keep.

Steps without draft tokens are those of an engine that never drafts. Steps with them have several
tokens per request, which no CUDA graph of a decode step takes: vLLM runs them piecewise or eagerly.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rlsched.settings import UsageError

WITHOUT = (
    "rejection_sampler",
    "speculator",
    "adaptive_verification",
    "batch_sharder",
    "pp_handler",
    "pcp_manager",
)
"""Parts of a runner that share out the rows of a step, or draw or verify in their own way."""


def install(worker: Any, tokens: int) -> None:
    """Let a worker's model runner verify the draft tokens that the scheduler gives it."""
    runner = worker.model_runner
    others = [name for name in WITHOUT if getattr(runner, name, None) is not None]
    if others or runner.decode_query_len != 1:
        others.append(f"decode_query_len={runner.decode_query_len}")
        raise UsageError(
            "`Speculation` with `VLLMEngine`: vLLM draws tokens of this model in a way of its own "
            f"({', '.join(others)}). Leave `Speculation` out."
        )
    states = runner.req_states
    states.draft_tokens = states.draft_tokens.new_zeros(len(states.draft_tokens), tokens)
    runner.prepare_inputs = partial(prepare_inputs, runner, runner.prepare_inputs)
    runner.sample = partial(sample, runner.sample)


def prepare_inputs(runner: Any, prepare: Any, scheduled: Any, *arguments: object) -> Any:
    """Prepare a step, with a row of logits per draft token if there are any."""
    drafts: dict[str, list[int]] = scheduled.scheduled_spec_decode_tokens
    if not drafts:
        return prepare(scheduled, *arguments)
    states = runner.req_states
    places = [states.req_id_to_index[name] for name in drafts]
    most = write(states.draft_tokens, places, [*drafts.values()])
    runner.decode_query_len = 1 + most  # vLLM's kernel fills no more rows of a request than this
    try:
        return prepare(scheduled, *arguments)
    finally:
        runner.decode_query_len = 1


def write(table: Tensor, places: list[int], drafts: list[list[int]]) -> int:
    """Write draft tokens into these rows of a table, in one copy without waiting."""
    most = table.shape[1]
    rows = [
        [place, *draft, *[0] * (most - len(draft))]
        for place, draft in zip(places, drafts, strict=True)
    ]
    moved = torch.tensor(rows, pin_memory=table.is_cuda).to(table.device, non_blocking=True)
    table[moved[:, 0]] = moved[:, 1:]
    return most


def sample(draw: Any, hidden_states: Tensor, batch: Any, grammar: Any) -> tuple[Any, Any, Any]:
    """Draw a step, and keep each request's draws up to the first that is not its draft token."""
    output, sampled, rejected = draw(hidden_states, batch, grammar)
    if not batch.num_draft_tokens:
        return output, sampled, rejected
    read = batch.input_ids[batch.logits_indices]
    most = int(batch.num_draft_tokens_per_req.max())  # on the host
    tokens, right = agreeing(output.sampled_token_ids[:, 0], read, batch.cu_num_logits, most)
    output.sampled_token_ids = tokens
    # vLLM keeps one row of each request, and none where a prompt is not computed to its end: such
    # a request has no draft tokens
    output.num_sampled, output.num_rejected = sampled + right, rejected - right
    return output, output.num_sampled, output.num_rejected


def agreeing(drawn: Tensor, read: Tensor, starts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Compare draws with draft tokens, without waiting for the device."""
    starts = starts.long()
    columns = torch.arange(1 + most, device=drawn.device)
    rows = (starts[:-1, None] + columns).clamp(max=len(drawn) - 1)
    tokens = drawn[rows]
    drafts = columns[1:] < starts.diff()[:, None]
    same = drafts & (tokens[:, :-1] == read[rows[:, 1:]])
    return tokens, same.int().cumprod(1).sum(1, dtype=torch.int32)
