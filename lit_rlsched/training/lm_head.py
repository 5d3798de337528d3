"""A causal language model in two parts, body and LM head, each checked against the whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from lit_rlsched.training.cast_once import cast_once

CHECKED_TOKENS = 32
"""Of the first row, on which body and head are compared with the model's own forward."""
TOLERANCE = 1e-3
"""Mean difference of log-probs that is taken for rounding: a thousand times that of fp32."""
TOLERANCE_HALF = 0.1
"""The same in bf16, fp16 and TF32: ten times the rounding."""
LOOKS_AHEAD = 5
"""Times this, where a prefix has another length and so other kernels: a model that looks ahead
differs by far more."""
UNLIKELY = -30.0
"""Log-probs below are as good as equal: of masked entries of the vocabulary, for example."""

_parts_differ: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""For each model that was checked, whether only its own forward gives its logits."""


class LMHead(NamedTuple):
    """From token ids to what predicts the next token, and from there to logits."""

    states: Callable[..., Tensor]
    """`input_ids` `[R, T]` and what else the model takes to hidden states `[R, T, H]`; to logits
    `[R, T, V]` where the model's own forward must be used."""
    logits: Callable[[Tensor], Tensor]
    """Some of these states to logits over the temperature, at least fp32: `[..., V]`."""


def lm_head(model: nn.Module, temperature: float = 1.0) -> LMHead:
    """Split a model into the parts by which `check_lm_head` has found it to be scored.

    For one pass: under autocast the head is cast at its first call.

    Args:
        model: A transformers causal language model, or one wrapped by PEFT.
        temperature: What logits are divided by.

    Raises:
        ValueError: the model has no LM head.
    """
    causal_lm, head, config = model_parts(model)
    if _parts_differ.get(model, False):

        def own_logits(input_ids: Tensor, **inputs: Any) -> Tensor:
            return _own_logits(model, input_ids, **inputs)

        def over_temperature(logits: Tensor) -> Tensor:
            logits = _at_least_fp32(logits)
            return logits if temperature == 1.0 else logits / temperature

        return LMHead(own_logits, over_temperature)
    transform = logit_transform(config, temperature)

    def states(input_ids: Tensor, **inputs: Any) -> Tensor:
        hidden = _body(causal_lm)(input_ids=input_ids, use_cache=False, **inputs)
        return hidden.last_hidden_state

    project = cast_once(head)
    return LMHead(states, lambda hidden: transform(project(hidden)))


@torch.no_grad()
def check_lm_head(model: nn.Module, token_ids: Tensor) -> None:
    """Compare body and LM head with the model's own forward.

    Where they differ, the model's own forward is used from then on, with a warning.

    Args:
        model: See `lm_head`.
        token_ids: `[T]`, a sequence as the model is to score it; of one token nothing is learned.

    Raises:
        ValueError: the model has no LM head; or no log-probs of its completions can be had: it
            looks ahead, or its logits do not belong to its tokens.
    """
    if len(token_ids) < 2:
        return
    input_ids = token_ids[None, :CHECKED_TOKENS]
    name = type(model_parts(model)[0]).__name__
    with _evaluating(model):
        own = _own_logits(model, input_ids)
        if own.shape[:2] != input_ids.shape:
            raise ValueError(
                f"`{name}` gives logits of shape {list(own.shape)} for {input_ids.shape[1]} "
                "tokens, so that none can be told to be a token's. PEFT's prompt learning does "
                "that: use LoRA instead."
            )
        half = input_ids.shape[1] // 2
        allowed = tolerance(model)
        ahead = _difference(_own_logits(model, input_ids[:, :half]), own[:, :half])
        if not ahead <= LOOKS_AHEAD * allowed:
            raise ValueError(
                f"`{name}` looks ahead: the log-probs of a token change by {ahead:.1e} with what "
                "follows it. Train a causal language model; one that can be either needs "
                "`is_decoder=True` in its config."
            )
        try:
            parts = lm_head(model)
            gap = _difference(parts.logits(parts.states(input_ids)), own)
            wrong = "" if gap <= allowed else f"log-probs are off by {gap:.1e}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model of another make raises
            wrong = f"{type(error).__name__}: {error}"
    _parts_differ[model] = bool(wrong)
    if wrong:
        rank_zero_warn(
            f"`{name}` computes its logits otherwise than by its LM head from its last hidden "
            f"states ({wrong}). Its own forward is used: the log-probs are right, but logits of "
            "all positions of a micro-batch are in memory at once. Lower `micro_batch_tokens` "
            "where that is too much."
        )


def is_checked(model: nn.Module) -> bool:
    """Whether it is known by which parts the model is scored, or cannot be, for want of values."""
    return model in _parts_differ or isinstance(next(model.parameters()), FakeTensor)


def tolerance(model: nn.Module) -> float:
    """What is rounding in the precision of the moment, as a mean difference of log-probs."""
    weight = next(model.parameters())
    half = (
        weight.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(weight.device.type)
        or torch.get_float32_matmul_precision() != "highest"
    )
    return TOLERANCE_HALF if half else TOLERANCE


def model_parts(model: nn.Module) -> tuple[Any, nn.Module, Any]:
    """The language model, its head and its configuration.

    Raises:
        ValueError: the model has no LM head.
    """
    causal_lm: Any = model
    if hasattr(model, "get_base_model"):  # PEFT; its layers stay in place
        causal_lm = causal_lm.get_base_model()
    head, config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    if head is None:
        raise ValueError(
            f"`{type(causal_lm).__name__}` has no LM head. Load it with `AutoModelForCausalLM`."
        )
    return causal_lm, head, config


def logit_transform(config: Any, temperature: float) -> Callable[[Tensor], Tensor]:
    """What happens to the LM head's output before the softmax, by the names transformers uses.

    A constant factor (Cohere, Falcon-H1, Granite, ...), then a soft cap (Gemma, xLSTM, ...), then
    temperature.
    """
    factor = 1.0
    divisors = ("logits_scaling", "logits_mup_width_multiplier")
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier", *divisors):
        value = getattr(config, name, None)
        if value is not None:
            # Granite divides by `logits_scaling`; HyperCLOVA X, alone, multiplies by it.
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


def _own_logits(model: nn.Module, input_ids: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=input_ids, use_cache=False, **inputs).logits


def _body(causal_lm: Any) -> nn.Module:
    """All but the head; some models (Llama 4's text model) do not name it where others do."""
    body = causal_lm.base_model
    if body is causal_lm:
        inner = (child for child in causal_lm.children() if isinstance(child, PreTrainedModel))
        body = next(inner, body)
    return body


def _difference(logits: Tensor, others: Tensor) -> float:
    """Mean absolute difference of log-probs over positions and vocabulary; NaN stays NaN."""
    ours, theirs = (_at_least_fp32(x).log_softmax(-1).clamp(min=UNLIKELY) for x in (logits, others))
    return float((ours - theirs).abs().mean())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off; then each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
