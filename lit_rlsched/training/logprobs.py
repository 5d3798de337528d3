"""Log-probabilities and entropies of the completion tokens, without a `[B, T, V]` logit tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lit_rlsched.settings import UsageError
from lit_rlsched.training.lm_head import LMHead, check_lm_head, is_checked, lm_head, model_parts

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Memory of one chunk's fp32 logits by device type. A GPU needs larger chunks to be busy, and each
chunk reads the head's weights once (`benchmarks.lm_head`)."""

SHARDED_FORWARD = "sharded_logprobs"
"""Attribute of a sharded model: `whole_logprobs` between gathering and freeing its weights."""


def default_chunk(device: str, vocab_size: int) -> int:
    """Number of positions per LM head call on a device of this type."""
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (4 * vocab_size))


def completion_mask(completion_lengths: Tensor) -> Tensor:
    """Boolean mask `[B, C]` of the positions that have a token, with `C` the maximum length."""
    positions = torch.arange(int(completion_lengths.max()), device=completion_lengths.device)
    return positions < completion_lengths.unsqueeze(1)


def completion_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    completion_lengths: Tensor,
    *,
    completion_rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `log softmax(logits / temperature)[token]` for every completion token.

    Only positions that predict a completion token go through the LM head, in chunks. With more than
    one chunk, the backward pass recomputes a chunk's logits. The first call with a model compares
    body and LM head with the model's own forward. If the logits differ, a warning says so and the
    model's own forward is used instead.

    Args:
        model: A transformers causal language model, or one wrapped by PEFT.
        input_ids: `[R, T]`, each row a prompt, its completions, then padding. Causal models need no
            attention mask for the padding.
        prompt_lengths: `[B]`, at least 1.
        completion_lengths: `[B]`, may be 0.
        completion_rows: `[B]`, the row of each completion: 0 to `R - 1`, ascending. The model must
            accept a 4-D attention mask and `position_ids` (see `shared_prefix.obstacle`). `None`:
            each completion has its own row.
        temperature: The sampling temperature of the completions.
        entropy: Whether to return the entropy of each prediction, without gradient.
        chunk_tokens: Positions per LM head call; by default `CHUNK_BYTES` of fp32 logits.

    Returns:
        The log-probabilities and the entropies (or None), both `[B, C]` with `C` the maximum
        completion length, at least fp32, zero where `completion_mask(completion_lengths)` is False.

    Raises:
        UsageError: If a prompt is empty, lengths exceed `T`, or `lm_head.check_lm_head` refuses the
            model.
    """
    sharded = getattr(model, SHARDED_FORWARD, None)
    return (sharded or partial(whole_logprobs, model))(
        input_ids,
        prompt_lengths,
        completion_lengths,
        completion_rows=completion_rows,
        temperature=temperature,
        entropy=entropy,
        chunk_tokens=chunk_tokens,
    )


def whole_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    completion_lengths: Tensor,
    *,
    completion_rows: Tensor | None,
    temperature: float,
    entropy: bool,
    chunk_tokens: int | None,
) -> tuple[Tensor, Tensor | None]:
    """`completion_logprobs` of a model whose weights are all here."""
    head, states, token_ids = _encode(
        model, temperature, input_ids, prompt_lengths, completion_lengths, completion_rows
    )
    score = partial(_score, head.logits, entropy)
    _, _, config = model_parts(model)
    chunk_tokens = chunk_tokens or default_chunk(states.device.type, config.vocab_size)
    logp, entropies = _score_in_chunks(score, states, token_ids, chunk_tokens)
    mask = completion_mask(completion_lengths)
    return _scatter(logp, mask), _scatter(entropies, mask) if entropy else None


def completion_states(
    model: nn.Module,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    completion_lengths: Tensor,
    completion_rows: Tensor | None = None,
) -> Tensor:
    """Compute the LM head's input for every completion token, `[N, H]`, completion by completion.

    If only the model's own forward is right, the result is its logits `[N, V]`. The arguments are
    those of `completion_logprobs`.
    """
    shape = prompt_lengths, completion_lengths, completion_rows
    return _encode(model, 1.0, input_ids, *shape)[1]


def _encode(
    model: nn.Module,
    temperature: float,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    completion_lengths: Tensor,
    completion_rows: Tensor | None,
) -> tuple[LMHead, Tensor, Tensor]:
    """Return the head, its input `[N, H]` for every completion token, and these tokens `[N]`."""
    starts = prompt_lengths
    if completion_rows is not None:
        starts = _completion_starts(prompt_lengths, completion_lengths, completion_rows)
    _check_lengths(input_ids, prompt_lengths, starts + completion_lengths)
    causal_lm, _, config = model_parts(model)
    _check_once(model, input_ids, starts + completion_lengths, completion_rows)
    head = lm_head(model, temperature)
    rows, columns = completion_mask(completion_lengths).nonzero(as_tuple=True)
    targets = starts[rows] + columns
    # The prompt's last token predicts the first token of each completion.
    sources = torch.where(columns > 0, targets, prompt_lengths[rows]) - 1
    layout: dict[str, Tensor] = {}
    if completion_rows is not None:
        rows = completion_rows[rows]
        layout = _shared_layout(input_ids, starts, completion_lengths, completion_rows)
        if config._attn_implementation == "eager":
            dtype = causal_lm.get_input_embeddings().weight.dtype
            layout["attention_mask"] = _to_addend(layout["attention_mask"], dtype)
    return head, head.states(input_ids, **layout)[rows, sources], input_ids[rows, targets]


def vocabulary_logprobs(model: nn.Module, states: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute `[N, V]` log-probs of the whole vocabulary from `completion_states`, unchunked."""
    return lm_head(model, temperature).logits(states).log_softmax(-1)


def token_logprobs(
    model: nn.Module, states: Tensor, token_ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Compute the log-probs `[N]` of tokens `[N]` from `completion_states`, in chunks."""
    _, _, config = model_parts(model)
    score = partial(_score, lm_head(model, temperature).logits, False)
    chunk = default_chunk(states.device.type, config.vocab_size)
    return _score_in_chunks(score, states, token_ids, chunk)[0]


def _check_once(
    model: nn.Module, input_ids: Tensor, ends: Tensor, completion_rows: Tensor | None = None
) -> None:
    """Check the LM head on the longest row, without padding, which changes what a model sees."""
    if is_checked(model):
        return
    longest = int(ends.argmax())
    row = longest if completion_rows is None else int(completion_rows[longest])
    check_lm_head(model, input_ids[row, : int(ends[longest])])


def _score(
    head: Callable[[Tensor], Tensor], entropy: bool, states: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target `[n]` and entropy (or zeros) `[n]` from states `[n, H]`."""
    logits = head(states)
    logp, log_normalizer = _TokenLogprob.apply(logits, targets)  # type: ignore[no-untyped-call]
    if not entropy:
        return logp, torch.zeros_like(logp)
    with torch.no_grad():
        entropies = log_normalizer - logits.softmax(dim=-1).mul_(logits).sum(dim=-1)
    return logp, entropies


class _TokenLogprob(torch.autograd.Function):
    """Log-probs of targets, and the normalizers without gradient.

    Autograd needs five temporaries as large as the logits; this needs one, with identical bits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_normalizer = logits.logsumexp(dim=-1)
        logp = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
        ctx.save_for_backward(logits, targets, log_normalizer)
        ctx.mark_non_differentiable(log_normalizer)
        ctx.set_materialize_grads(False)
        return logp, log_normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, targets, log_normalizer = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        of_logits = (logits - log_normalizer.unsqueeze(-1)).exp_().mul_(-gradient)
        return of_logits.scatter_add_(-1, targets.unsqueeze(-1), gradient), None


def _score_in_chunks(
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    states: Tensor,
    targets: Tensor,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    chunks = list(zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    # A single chunk fits in memory; checkpointing would only add a second LM head call.
    if len(chunks) > 1 and torch.is_grad_enabled():
        scored = [checkpoint(score, h, t, use_reentrant=False) for h, t in chunks]
    else:
        scored = [score(h, t) for h, t in chunks]
    return torch.cat([logp for logp, _ in scored]), torch.cat([ent for _, ent in scored])


def _scatter(flat: Tensor, mask: Tensor) -> Tensor:
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def _completion_starts(
    prompt_lengths: Tensor, completion_lengths: Tensor, completion_rows: Tensor
) -> Tensor:
    """The column `[B]` at which each completion starts in its row."""
    before = completion_lengths.cumsum(0) - completion_lengths
    first_of_row = torch.searchsorted(completion_rows, completion_rows)
    return prompt_lengths + before - before[first_of_row]


def _shared_layout(
    input_ids: Tensor, starts: Tensor, completion_lengths: Tensor, completion_rows: Tensor
) -> dict[str, Tensor]:
    """Build model inputs that hide the completions of one row from each other."""
    rows, width = input_ids.shape
    ends = starts + completion_lengths
    jumps = torch.zeros(2, rows, width + 1, dtype=torch.long, device=input_ids.device)
    segments, ahead = jumps
    # Each start and each end begins a new segment, whose positions restart after the prompt.
    for places in (starts, ends):
        segments.index_put_((completion_rows, places), torch.ones_like(places), accumulate=True)
    ahead.index_put_((completion_rows, ends), completion_lengths, accumulate=True)
    segments, ahead = jumps.cumsum(-1)
    padding = segments == segments[:, -1:]
    positions = torch.arange(width + 1, device=input_ids.device) - ahead
    # Padding must not exceed the model's table of positions.
    positions = positions.masked_fill(padding, 0)[:, :-1]
    segments = segments[:, :-1]
    mask = segments.unsqueeze(2) == segments.unsqueeze(1)
    mask |= (segments == 0).unsqueeze(1)  # all see the prompt
    return {"position_ids": positions, "attention_mask": mask.tril_().unsqueeze(1)}


def _to_addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The addend of eager attention's scores: 0 where `mask` is True, else the minimum."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _check_lengths(input_ids: Tensor, prompt_lengths: Tensor, ends: Tensor) -> None:
    if bool((prompt_lengths < 1).any()):
        raise UsageError(
            "A prompt is empty, so no position predicts its first completion token. Put the BOS or "
            "EOS token in front of it."
        )
    longest = int(ends.max())
    if longest > input_ids.shape[1]:
        raise UsageError(
            f"`prompt_lengths` plus `completion_lengths` reaches {longest}, past the "
            f"{input_ids.shape[1]} columns of `input_ids`. Pad `input_ids` to the longest row."
        )
