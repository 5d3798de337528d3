"""Log-probabilities and entropies of the completion tokens, without a `[B, T, V]` logit tensor.

A causal language model is split into body and LM head, and compared once with the whole model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import evaluating
from lit_rlsched.training.precision import cast_once

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Memory of one chunk's fp32 logits by device type. A GPU needs larger chunks to be busy, and each
chunk reads the head's weights once (`benchmarks.lm_head`)."""

SHARDED_FORWARD = "sharded_logprobs"
"""Attribute of a sharded model: `whole_logprobs` between gathering and freeing its weights."""
CHECKED_TOKENS = 32
"""Tokens of a sequence on which body and head are compared with the model's own forward."""
TOLERANCE = 1e-3
"""Mean difference of log-probs that counts as rounding: a thousand times that of fp32."""
TOLERANCE_HALF = 0.1
"""The same for bf16, fp16 and TF32: ten times their rounding."""
LOOKS_AHEAD = 5
"""Factor on the tolerance where a prefix is encoded, whose length selects other kernels. A model
that looks ahead differs by far more."""
UNLIKELY = -30.0
"""Log-probs below this value count as equal, for example those of masked vocabulary entries."""

_checked: WeakSet[nn.Module] = WeakSet()
"""Models whose body and head compute what they compute themselves."""


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
    body and LM head with the model's own forward.

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
    score = partial(_score, head, entropy)
    _, _, config = model_parts(model)
    chunk_tokens = chunk_tokens or default_chunk(states.device.type, config.vocab_size)
    mask = completion_mask(completion_lengths)
    logp, entropies = (
        flat.new_zeros(mask.shape).masked_scatter(mask, flat)
        for flat in _score_in_chunks(score, states, token_ids, chunk_tokens)
    )
    return logp, entropies if entropy else None


def completion_states(
    model: nn.Module,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    completion_lengths: Tensor,
    completion_rows: Tensor | None = None,
) -> Tensor:
    """Compute the LM head's input for every completion token, `[N, H]`, completion by completion.

    The arguments are those of `completion_logprobs`.
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
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return the head, its input `[N, H]` for every completion token, and these tokens `[N]`."""
    starts = prompt_lengths
    if completion_rows is not None:  # completions of a row follow each other
        before = completion_lengths.cumsum(0) - completion_lengths
        first_of_row = torch.searchsorted(completion_rows, completion_rows)
        starts = prompt_lengths + before - before[first_of_row]
    ends = starts + completion_lengths
    if bool((prompt_lengths < 1).any()):
        raise UsageError(
            "A prompt is empty, so no position predicts its first completion token. Put the BOS or "
            "EOS token in front of it."
        )
    end = int(ends.max())
    if end > input_ids.shape[1]:
        raise UsageError(
            f"`prompt_lengths` plus `completion_lengths` reaches {end}, past the "
            f"{input_ids.shape[1]} columns of `input_ids`. Pad `input_ids` to the longest row."
        )
    causal_lm, _, config = model_parts(model)
    if model not in _checked and not isinstance(next(model.parameters()), FakeTensor):
        longest = int(ends.argmax())
        row = longest if completion_rows is None else int(completion_rows[longest])
        check_lm_head(model, input_ids[row, :end])  # no padding: it changes what a model sees
    body, head = lm_head(model, temperature)
    rows, columns = completion_mask(completion_lengths).nonzero(as_tuple=True)
    targets = starts[rows] + columns
    # The prompt's last token predicts the first token of each completion.
    sources = torch.where(columns > 0, targets, prompt_lengths[rows]) - 1
    layout: dict[str, Tensor] = {}
    if completion_rows is not None:
        rows = completion_rows[rows]
        layout = _shared_layout(input_ids, starts, completion_lengths, completion_rows)
        if config._attn_implementation == "eager":  # adds the mask to its scores
            seen, dtype = layout["attention_mask"], causal_lm.get_input_embeddings().weight.dtype
            added = torch.zeros_like(seen, dtype=dtype)
            layout["attention_mask"] = added.masked_fill_(~seen, torch.finfo(dtype).min)
    return head, body(input_ids, **layout)[rows, sources], input_ids[rows, targets]


def vocabulary_logprobs(model: nn.Module, states: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute `[N, V]` log-probs of the whole vocabulary from `completion_states`, unchunked."""
    _, head = lm_head(model, temperature)
    return head(states).log_softmax(-1)


def token_logprobs(
    model: nn.Module, states: Tensor, token_ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Compute the log-probs `[N]` of tokens `[N]` from `completion_states`, in chunks."""
    _, _, config = model_parts(model)
    score = partial(_score, lm_head(model, temperature)[1], False)
    chunk = default_chunk(states.device.type, config.vocab_size)
    return _score_in_chunks(score, states, token_ids, chunk)[0]


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


def lm_head(
    model: nn.Module, temperature: float = 1.0
) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """Split a model into the functions of its body and of its head, as `check_lm_head` found right.

    The first goes from `input_ids` `[R, T]` and other model inputs to hidden states `[R, T, H]`,
    the second from some of these to `[..., V]` logits over the temperature, at least fp32. Use them
    for one pass only: under autocast the head keeps a cast copy of its weights.
    """
    causal_lm, head, config = model_parts(model)
    body = causal_lm.base_model
    if body is causal_lm:  # Llama 4 text
        inner = (child for child in causal_lm.children() if isinstance(child, PreTrainedModel))
        body = next(inner, body)
    transform = logit_transform(config, temperature)
    project = cast_once(head)
    return (
        lambda input_ids, **inputs: (
            body(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
        ),
        lambda hidden: transform(project(hidden)),
    )


@torch.no_grad()
def check_lm_head(model: nn.Module, token_ids: Tensor) -> None:
    """Refuse a model whose own forward is not its LM head on its body, on `[T]` tokens."""
    if len(token_ids) < 2:
        return
    input_ids = token_ids[None, :CHECKED_TOKENS]
    name = type(model_parts(model)[0]).__name__
    with evaluating(model):
        own = _own_logits(model, input_ids)
        if own.shape[:2] != input_ids.shape:
            raise UsageError(
                f"`{name}` returns logits of shape {list(own.shape)} for {input_ids.shape[1]} "
                "tokens, so logits cannot be matched with tokens. PEFT's prompt learning does "
                "that: use LoRA instead."
            )
        half = input_ids.shape[1] // 2
        allowed = tolerance(model)
        ahead = _difference(_own_logits(model, input_ids[:, :half]), own[:, :half])
        if not ahead <= LOOKS_AHEAD * allowed:
            raise UsageError(
                f"`{name}` looks ahead: the log-probs of a token change by {ahead:.1e} with the "
                "tokens after it. Train a causal language model; a model that can be either needs "
                "`is_decoder=True` in its config."
            )
        body, head = lm_head(model)
        gap = _difference(head(body(input_ids)), own)
    if not gap <= allowed:
        raise UsageError(
            f"`{name}` does not compute its logits by applying its LM head to its last hidden "
            f"states (log-probs differ by {gap:.1e}), so log-probs cannot be computed in chunks. "
            "Train another model."
        )
    _checked.add(model)


def tolerance(model: nn.Module) -> float:
    """Mean difference of log-probs that counts as rounding in the current precision."""
    weight = next(model.parameters())
    half = (
        weight.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(weight.device.type)
        or torch.get_float32_matmul_precision() != "highest"
    )
    return TOLERANCE_HALF if half else TOLERANCE


def model_parts(model: nn.Module) -> tuple[Any, nn.Module, Any]:
    """The language model without a PEFT wrapper, its LM head and its text config."""
    causal_lm: Any = base_model(model)
    head = causal_lm.get_output_embeddings()
    if head is None:
        raise UsageError(
            f"`{type(causal_lm).__name__}` has no LM head. Load it with `AutoModelForCausalLM`."
        )
    return causal_lm, head, causal_lm.config.get_text_config()


def logit_transform(config: Any, temperature: float) -> Callable[[Tensor], Tensor]:
    """What a model applies to the LM head's output before the softmax, with temperature.

    The order is a constant factor (Cohere, Falcon-H1, Granite, ...), a soft cap (Gemma, xLSTM, ...)
    and the temperature. The settings are found by the names that transformers uses.
    """
    factor = 1.0
    divisors = ("logits_scaling", "logits_mup_width_multiplier")
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier", *divisors):
        value = getattr(config, name, None)
        if value is not None:
            # Granite divides by `logits_scaling`; only HyperCLOVA X multiplies by it.
            divides = name in divisors and config.model_type != "hyperclovax"
            factor = 1.0 / value if divides else value
            break
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    cap = next((c for name in caps if (c := getattr(config, name, None)) is not None), None)

    def transform(logits: Tensor) -> Tensor:
        logits = _at_least_fp32(logits)
        if cap is not None:
            return torch.tanh(logits * (factor / cap)) * (cap / temperature)
        scale = factor / temperature
        return logits if scale == 1.0 else logits * scale

    return transform


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _own_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids, use_cache=False).logits


def _difference(logits: Tensor, others: Tensor) -> float:
    """Mean absolute difference of log-probs over positions and vocabulary; keeps NaN."""
    ours, theirs = (_at_least_fp32(x).log_softmax(-1).clamp(min=UNLIKELY) for x in (logits, others))
    return float((ours - theirs).abs().mean())
