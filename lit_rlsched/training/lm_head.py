"""A causal language model split into body and LM head, compared once with the whole model."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel

from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import evaluating

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

_parts_differ: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""For each checked model, whether only its own forward computes its logits."""


class LMHead(NamedTuple):
    """The functions from token ids to hidden states and from there to logits."""

    states: Callable[..., Tensor]
    """From `input_ids` `[R, T]` and other model inputs to hidden states `[R, T, H]`, or to logits
    `[R, T, V]` if the model's own forward must be used."""
    logits: Callable[[Tensor], Tensor]
    """From some of these states to `[..., V]` logits over the temperature, at least fp32."""


def lm_head(model: nn.Module, temperature: float = 1.0) -> LMHead:
    """Split a model as `check_lm_head` found right.

    Use the result for one pass only: under autocast it keeps a cast copy of the head's weights.
    """
    causal_lm, head, config = model_parts(model)
    if _parts_differ.get(model, False):

        def over_temperature(logits: Tensor) -> Tensor:
            logits = _at_least_fp32(logits)
            return logits if temperature == 1.0 else logits / temperature  # saves a copy

        return LMHead(partial(_own_logits, model), over_temperature)
    transform = logit_transform(config, temperature)
    project = cast_once(head)

    def states(input_ids: Tensor, **inputs: Any) -> Tensor:
        hidden = _body(causal_lm)(input_ids=input_ids, use_cache=False, **inputs)
        return hidden.last_hidden_state

    return LMHead(states, lambda hidden: transform(project(hidden)))


@torch.no_grad()
def check_lm_head(model: nn.Module, token_ids: Tensor) -> None:
    """Compare body and LM head with the model's own forward on `[T]` tokens of a sequence.

    If they differ, `lm_head` uses the model's own forward from then on; a warning says so.
    """
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
        try:
            parts = lm_head(model)
            gap = _difference(parts.logits(parts.states(input_ids)), own)
            wrong = "" if gap <= allowed else f"log-probs differ by {gap:.1e}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may raise anything
            wrong = f"{type(error).__name__}: {error}"
    _parts_differ[model] = bool(wrong)
    if wrong:
        rank_zero_warn(
            f"`{name}` does not compute its logits by applying its LM head to its last hidden "
            f"states ({wrong}). Its own forward is used instead: the log-probs are right, but the "
            "logits of all positions of a micro-batch are in memory at once. Lower "
            "`micro_batch_tokens` if that is too much."
        )


def is_checked(model: nn.Module) -> bool:
    """Whether the model was checked, or cannot be because its tensors are fake."""
    return model in _parts_differ or isinstance(next(model.parameters()), FakeTensor)


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


def cast_once(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Cast a linear layer's weights to autocast's precision once for all calls of a pass.

    `torch.autocast` with `cache_enabled=False`, as Lightning enters it, casts them in every call
    and every recomputation. Values and gradients are unchanged: the gradients of the calls are cast
    to fp32 one by one and added in fp32.
    """
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32:
        return layer
    device = layer.weight.device.type
    if not torch.is_autocast_enabled(device):
        return layer
    dtype = torch.get_autocast_dtype(device)
    parameters = dict(layer.named_parameters())
    low: dict[str, Tensor] = {}

    def call(states: Tensor) -> Tensor:
        if not low:  # at the first call, because the body's pass needs the memory
            low.update((name, p.detach().to(dtype)) for name, p in parameters.items())
        used = {name: _Cast.apply(p, low[name]) for name, p in parameters.items()}  # type: ignore[no-untyped-call]
        return functional_call(layer, used, (states,))

    return call


class _Cast(torch.autograd.Function):
    """Return a cast made earlier; the backward pass casts the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return low.view_as(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(ctx.dtype), None


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _own_logits(model: nn.Module, input_ids: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=input_ids, use_cache=False, **inputs).logits


def _body(causal_lm: Any) -> nn.Module:
    """The model without its head, also where `base_model` does not find it (Llama 4 text)."""
    body = causal_lm.base_model
    if body is causal_lm:
        inner = (child for child in causal_lm.children() if isinstance(child, PreTrainedModel))
        body = next(inner, body)
    return body


def _difference(logits: Tensor, others: Tensor) -> float:
    """Mean absolute difference of log-probs over positions and vocabulary; keeps NaN."""
    ours, theirs = (_at_least_fp32(x).log_softmax(-1).clamp(min=UNLIKELY) for x in (logits, others))
    return float((ours - theirs).abs().mean())
