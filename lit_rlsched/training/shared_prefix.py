"""Decide whether the update may encode a prompt once for several of its completions.

A row of `input_ids` is then a prompt followed by completions that do not see each other: the model
gets a 4-D attention mask, and positions that continue from the prompt for each completion.
`micro_batches.share_prompts` decides which completions share a row. See
`docs/explanation/repetition.md`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_rlsched.ranks import Team
from lit_rlsched.training.logprobs import completion_logprobs, completion_mask, tolerance
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.micro_batches import EncodedRows, PromptRow, RowCost, share_prompts
from lit_rlsched.training.policy import context_length
from lit_rlsched.training.precision import ForwardContext
from lit_rlsched.types import Sample

ATTENTION_PRICE = 1.4
"""Time of a FLOP in attention over that of one in a matrix product, measured on a CPU. Causal
attention skips half of its pairs, attention with a mask none."""
MASK_PRICE = {"cpu": 1.0}
"""Factor on the price of attention with a mask, by device type."""
MASK_PRICE_ELSEWHERE = 3.0
"""Not measured. A GPU's fastest attention takes no mask, so sharing must save a lot there."""
CHECKED_COMPLETIONS = 3
"""Completions of one prompt that the check encodes in both ways."""
CHECKED_WEIGHTS = 2**22
"""Weights whose gradients the check compares, the smallest tensors first. Every layer has some, and
their gradients have passed through the attention of all layers above."""
CHECKED_PROMPT = 16
"""Length of the shortened prompt in a second comparison, in which completions that see each other
stand out. The whole prompt shows errors that depend on distance."""


def obstacle(policy: nn.Module) -> str | None:
    """Say why completions of this model cannot share a prompt, or `None` if nothing is known.

    Sliding windows and recurrent layers depend on columns, which differ from the tokens' positions
    in a shared row.
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
        return f"its attention has a window of {window} tokens"
    recurrent = (nn.RNNBase, nn.Conv1d)
    if model._is_stateful or any(isinstance(part, recurrent) for part in model.modules()):
        return "it has recurrent or convolutional layers"
    takes = inspect.signature(model.base_model.forward).parameters
    if "position_ids" not in takes or getattr(config, "alibi", False):
        return "it takes no `position_ids`"
    return None


def row_cost(policy: nn.Module) -> RowCost:
    """The cost of a forward pass without the LM head, whose cost sharing does not change."""
    model = base_model(policy)
    config: Any = model.config.get_text_config()
    tables = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    looked_up = set(map(id, tables))
    body = model.base_model.named_parameters()
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, e) for e in experts if getattr(config, e, None)), 1)
    share = float(getattr(config, "num_experts_per_tok", count) / count)  # that a token uses
    used = sum(
        p.numel() * (share if ".experts." in name else 1.0)
        for name, p in body
        if id(p) not in looked_up
    )
    head_dim = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_dim if head_dim else config.hidden_size
    pair = 4 * config.num_hidden_layers * width * ATTENTION_PRICE
    device = next(policy.parameters()).device.type
    return RowCost(2 * used, pair / 2, pair * MASK_PRICE.get(device, MASK_PRICE_ELSEWHERE))


def difference(policy: nn.Module, samples: Sequence[Sample]) -> tuple[float, float]:
    """Encode completions of one group with a shared and with repeated prompts, and compare.

    This needs no more memory than an update on the shared row. `policy` keeps its `grad`.
    """
    weights: list[Tensor] = []
    for weight in sorted((p for p in policy.parameters() if p.requires_grad), key=Tensor.numel):
        if weights and sum(map(Tensor.numel, [*weights, weight])) > CHECKED_WEIGHTS:
            break
        weights.append(weight)
    group = samples[0].group
    prompt = replace(group.prompt, token_ids=group.prompt.token_ids[-CHECKED_PROMPT:])
    cut = [replace(sample, group=replace(group, prompt=prompt)) for sample in samples]
    pairs = []
    for compared in (samples, cut):
        repeated = [_encode(policy, [sample], weights) for sample in compared]
        logp = torch.cat([logp for logp, _ in repeated])
        gradient = torch.stack([gradient for _, gradient in repeated]).sum(0)
        shared_logp, shared_gradient = _encode(policy, compared, weights)
        gap = (shared_gradient - gradient).norm() / gradient.norm()
        pairs.append((float((shared_logp - logp).abs().mean()), float(gap)))
    logprobs, gradients = torch.tensor(pairs).amax(0).tolist()  # keeps NaN
    return logprobs, gradients


@torch.enable_grad()
def _encode(
    policy: nn.Module, samples: Sequence[Sample], weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The completions' log-probs, one after the other, and the gradient of their sum."""
    encoded = EncodedRows.of([PromptRow(tuple(samples))]).to(weights[0].device)
    logp, _ = completion_logprobs(policy, **encoded._asdict())
    gradients = torch.autograd.grad(logp.sum(), weights, materialize_grads=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return logp.detach()[completion_mask(encoded.completion_lengths)], flat.to(logp.dtype)


class Sharing:
    """Remembers whether a model gets shared prompts right, which is checked once."""

    def __init__(self) -> None:
        self.works: bool | None = None
        """`None` until it was checked; part of the module's checkpoint."""

    def cost(
        self,
        model: nn.Module,
        samples: Sequence[Sample],
        micro_batch_tokens: int,
        forward_context: ForwardContext,
        team: Team | None = None,
    ) -> RowCost | None:
        """Return the cost by which completions share a prompt, or `None` if they must not.

        The first of `samples` that would share a prompt are used for the check. `None` as well if
        it was not made because none of them would.
        """
        if self.works is False or obstacle(model) is not None:
            return None
        cost = row_cost(model)
        if self.works is None:
            rows = share_prompts(samples, cost, micro_batch_tokens)
            tried = next((row.samples for row in rows if row.shared), None)
            if tried is not None:
                team = team or Team()
                works = _is_right(model, tried[:CHECKED_COMPLETIONS], forward_context)
                if team.leading:
                    team.call("sharing", lambda works: None, works)
                else:  # all ranks share prompts, or none: their micro-batches must be the same
                    works = all(team.all_gather(works))
                self.works = works
        return cost if self.works else None


def _is_right(model: nn.Module, samples: Sequence[Sample], forward_context: ForwardContext) -> bool:
    """Whether log-probs and gradients equal those of separate rows; warn if they do not."""
    try:
        with forward_context():
            logprobs, gradients = difference(model, samples)
            allowed = tolerance(model)
        if logprobs <= allowed and gradients <= allowed:  # False for NaN
            return True
        wrong = (
            f"log-probs differ by {logprobs:.1e}, gradients by {gradients:.1e} of their norm "
            f"(rounding explains {allowed:.0e})"
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise anything for a mask it does not expect
        wrong = f"{type(error).__name__}: {error}"
    rank_zero_warn(
        f"`{type(base_model(model)).__name__}` computes wrong results when completions share a "
        f"prompt: {wrong}. Each completion is encoded with its own prompt instead; "
        "`shared_prefix=False` skips this check."
    )
    return False
