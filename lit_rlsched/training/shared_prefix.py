"""Decide whether the update may encode a prompt once for several of its completions.

A row of `input_ids` is then a prompt followed by completions that do not see each other: the model
gets a 4-D attention mask, and positions that continue from the prompt for each completion.
`micro_batches.share_prompts` decides which completions share a row. See
`docs/explanation/repetition.md`.
"""

import inspect
from typing import Any

from torch import nn

from lit_rlsched.training.lora import base_model
from lit_rlsched.training.micro_batches import RowCost
from lit_rlsched.training.policy import context_length

ATTENTION_PRICE = 1.4
"""Time of a FLOP in attention over that of one in a matrix product, measured on a CPU. Causal
attention skips half of its pairs, attention with a mask none."""
MASK_PRICE = {"cpu": 1.0}
"""Factor on the price of attention with a mask, by device type."""
MASK_PRICE_ELSEWHERE = 3.0
"""Not measured. A GPU's fastest attention takes no mask, so sharing must save a lot there."""


def obstacle(policy: nn.Module) -> str | None:
    """Say why completions of this model cannot share a prompt, or `None` if they can.

    Sliding windows and recurrent layers depend on columns, which differ from the tokens' positions
    in a shared row. Of models with a table of positions, some ignore the positions that they get.
    """
    model = base_model(policy)
    config: Any = model.config.get_text_config()
    if not type(model).__module__.startswith("transformers."):
        return "its code is not part of transformers"
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
    if not getattr(config, "rope_parameters", None):
        return "it has no rotary embeddings"
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
