"""Whether the update may encode a prompt once for several of its completions, and what that costs.

A row of `input_ids` is then a prompt followed by completions that do not see each other: the model
is given a 4-D attention mask and positions that go on from the prompt for each completion. Which
completions share a row, `micro_batches.share_prompts` decides.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_rlsched.policy import base_model, context_length
from lit_rlsched.training.lm_head import tolerance
from lit_rlsched.training.logprobs import completion_logprobs, completion_mask
from lit_rlsched.training.micro_batches import PromptRow, RowCost, share_prompts
from lit_rlsched.types import Sample

ATTENTION_PRICE = 1.4
"""Time of a FLOP in attention over that of one in a matrix product, measured on a CPU. Causal
attention skips half of its pairs, attention with a mask none."""
MASK_PRICE = {"cpu": 1.0}
"""What a mask adds to that, by device type."""
MASK_PRICE_ELSEWHERE = 3.0
"""Not measured: a GPU's fastest attention takes no mask, so sharing must save much to be chosen."""
CHECKED_COMPLETIONS = 3
"""Completions of one prompt that the check encodes in both ways."""
CHECKED_WEIGHTS = 2**22
"""Weights whose gradients the check compares: the smallest tensors, which every layer has. What
reaches them has come through the attention of all layers above."""
CHECKED_PROMPT = 16
"""Tokens of its prompt that are left for a second comparison. What completions wrongly see of each
other stands out there; the whole prompt shows what depends on the distance."""


def obstacle(policy: nn.Module) -> str | None:
    """Why completions of this model cannot share a prompt, as far as can be seen; `None`: they can.

    Sliding windows and recurrent layers go by columns, which are not the tokens' positions where a
    prompt is shared.

    Args:
        policy: A transformers causal language model, or one wrapped by PEFT.
    """
    model = base_model(policy)
    config: Any = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is `{config._attn_implementation}`, not `sdpa` or `eager`"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if not kinds and window is not None and window < context_length(policy):
        return f"its attention reaches back {window} tokens"
    recurrent = (nn.RNNBase, nn.Conv1d)
    if model._is_stateful or any(isinstance(part, recurrent) for part in model.modules()):
        return "it has recurrent or convolutional layers"
    takes = inspect.signature(model.base_model.forward).parameters
    if "position_ids" not in takes or getattr(config, "alibi", False):
        return "it takes no `position_ids`"
    return None


def row_cost(policy: nn.Module) -> RowCost:
    """What a forward pass of the model costs; a backward pass is twice that in every part.

    The LM head is left out: it sees the same positions however the completions are laid out.
    """
    model = base_model(policy)
    config: Any = model.config.get_text_config()
    tables = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    looked_up = set(map(id, tables))
    body = model.base_model.named_parameters()
    used = sum(p.numel() * _used(config, name) for name, p in body if id(p) not in looked_up)
    head_dim = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_dim if head_dim else config.hidden_size
    pair = 4 * config.num_hidden_layers * width * ATTENTION_PRICE
    device = next(policy.parameters()).device.type
    return RowCost(2 * used, pair / 2, pair * MASK_PRICE.get(device, MASK_PRICE_ELSEWHERE))


def _used(config: Any, name: str) -> float:
    """The share of a parameter that a token passes through: of experts, only some."""
    if ".experts." not in name:
        return 1.0
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, e) for e in experts if getattr(config, e, None)), 1)
    return float(getattr(config, "num_experts_per_tok", count) / count)


def first_shared(
    rows: Sequence[Sample], cost: RowCost, micro_batch_tokens: int
) -> tuple[Sample, ...] | None:
    """A few completions of the first prompt that would be shared; `None` where none would."""
    drawn = [r for r in rows if r.completion.token_ids and not r.completion.dropped]
    for row in share_prompts(drawn, cost, micro_batch_tokens):
        if row.shared:
            return row.rows[:CHECKED_COMPLETIONS]
    return None


def difference(policy: nn.Module, rows: Sequence[Sample]) -> tuple[float, float]:
    """Encode completions with their prompt shared and repeated, and compare.

    Needs no more memory than an update on that row; the repeated ones go through one by one.

    Args:
        policy: The model that is trained. Its `grad` is left alone.
        rows: Completions of one group.

    Returns:
        Mean absolute difference of the log-probs; norm of the difference of the gradients over
        that of the gradients. The larger ones of two comparisons: with the whole prompt and with
        its last `CHECKED_PROMPT` tokens.
    """
    weights: list[Tensor] = []
    for weight in sorted((p for p in policy.parameters() if p.requires_grad), key=Tensor.numel):
        if weights and sum(map(Tensor.numel, [*weights, weight])) > CHECKED_WEIGHTS:
            break
        weights.append(weight)
    group = rows[0].group
    prompt = replace(group.prompt, token_ids=group.prompt.token_ids[-CHECKED_PROMPT:])
    cut = [replace(row, group=replace(group, prompt=prompt)) for row in rows]
    pairs = [_difference(policy, of, weights) for of in (rows, cut)]
    logprobs, gradients = torch.tensor(pairs).amax(0).tolist()  # NaN stays NaN
    return logprobs, gradients


def _difference(
    policy: nn.Module, rows: Sequence[Sample], weights: list[Tensor]
) -> tuple[float, float]:
    repeated = [_encode(policy, [row], weights) for row in rows]
    logp = torch.cat([logp for logp, _ in repeated])
    gradient = torch.stack([gradient for _, gradient in repeated]).sum(0)
    shared_logp, shared_gradient = _encode(policy, rows, weights)
    gap = (shared_gradient - gradient).norm() / gradient.norm()
    return float((shared_logp - logp).abs().mean()), float(gap)


@torch.enable_grad()
def _encode(
    policy: nn.Module, rows: Sequence[Sample], weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The completions' log-probs, one after the other, and the gradient of their sum."""
    device = weights[0].device
    lengths = torch.tensor([len(row.completion.token_ids) for row in rows], device=device)
    logp, _ = completion_logprobs(
        policy,
        torch.tensor([PromptRow(tuple(rows)).token_ids], device=device),
        torch.tensor([len(row.group.prompt.token_ids) for row in rows], device=device),
        lengths,
        completion_rows=torch.zeros_like(lengths) if len(rows) > 1 else None,
    )
    gradients = torch.autograd.grad(logp.sum(), weights, allow_unused=True)
    flat = [
        torch.zeros_like(w).flatten() if g is None else g.flatten()
        for w, g in zip(weights, gradients, strict=True)
    ]
    return logp.detach()[completion_mask(lengths)], torch.cat(flat).to(logp.dtype)


class Sharing:
    """Whether completions may share a prompt: known once some were encoded both ways."""

    def __init__(self) -> None:
        self.works: bool | None = None
        """`None`: not tried yet. In the module's checkpoint."""

    def cost(
        self,
        model: nn.Module,
        rows: Sequence[Sample],
        micro_batch_tokens: int,
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> RowCost | None:
        """By what cost completions share a prompt, or `None`: they do not.

        Args:
            model: The policy.
            rows: Completions that are about to be laid out; the first that would share are tried.
            micro_batch_tokens: Most positions of a row.
            forward_context: The Trainer's precision context.
        """
        if self.works is False or obstacle(model) is not None:
            return None
        cost = row_cost(model)
        if self.works is None:
            tried = first_shared(rows, cost, micro_batch_tokens)
            if tried is not None:
                self.works = _gets_it_right(model, tried, forward_context)
        return None if self.works is False else cost


def _gets_it_right(
    model: nn.Module,
    rows: Sequence[Sample],
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Whether log-probs and gradients are those of separate rows; warns where they are not."""
    try:
        with forward_context():
            logprobs, gradients = difference(model, rows)
            allowed = tolerance(model)
        if logprobs <= allowed and gradients <= allowed:  # NaN is not
            return True
        wrong = (
            f"log-probs are off by {logprobs:.1e}, gradients by {gradients:.1e} of their norm "
            f"({allowed:.0e} would be rounding)"
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model makes of a mask it does not expect
        wrong = f"{type(error).__name__}: {error}"
    rank_zero_warn(
        f"`{type(base_model(model)).__name__}` does not get a prompt right that completions "
        f"share: {wrong}. Each completion is encoded with its own prompt; "
        "`shared_prefix=False` saves trying."
    )
    return False
