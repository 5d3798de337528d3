"""Key-value cache with a slot per running request, and attention over it in a decode step."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from lit_rlsched.settings import UsageError

_RELATIVE = ("mpt",)
"""Kinds of models that take no positions and need none: only distances count."""


class SlotCache:
    """The `past_key_values` of a transformers model.

    Takes its shapes from the first keys and values, and grows up to `slots` rows of `max_length`.
    """

    is_compileable = False

    def __init__(self, slots: int, max_length: int) -> None:
        self._slots, self._max_length = slots, max_length
        self._layers: dict[int, tuple[Tensor, ...]] = {}  # [slots, heads, length, head size]
        self._targets: list[int] | None = None

    def prefill(self, targets: list[list[int]], length: int) -> None:
        """Store row i of the next pass, of `length` tokens, in each of the slots `targets[i]`."""
        self._length = length
        self._targets = [slot for slots in targets for slot in slots]
        self._source = [row for row, slots in enumerate(targets) for _ in slots]

    def decode(self, positions: Tensor, length: int) -> None:
        """Prepare for a token of each of the first slots, at `positions`, `[B]`.

        The largest position is `length - 1`.
        """
        self._targets, self._length = None, length
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions; no slot may be both source and target."""
        for layer, (keys, values) in self._layers.items():
            for tensor in self._room(layer, keys, values, max(targets) + 1, length):
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values, and return those it attends to."""
        length = self._length
        if self._targets is not None:
            room = self._room(layer, keys, values, max(self._targets) + 1, length)
            for tensor, new in zip(room, (keys, values), strict=True):
                tensor[self._targets, :, :length] = new[self._source]
            return keys, values
        room = self._room(layer, keys, values, len(self._rows), length)
        for tensor, new in zip(room, (keys, values), strict=True):
            tensor[self._rows, :, self._positions] = new[:, :, 0]
        return room[0][: len(self._rows), :, :length], room[1][: len(self._rows), :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Only called in a prefill: a decode step passes its own mask."""
        return query_length, 0

    def _room(
        self, layer: int, keys: Tensor, values: Tensor, rows: int, length: int
    ) -> tuple[Tensor, ...]:
        """Return the layer's tensors, grown to at least `rows` slots of `length`."""
        stored = self._layers.get(layer) or (keys[:0, :, :0], values[:0, :, :0])
        have_rows, _, have_length, _ = stored[0].shape
        if rows > have_rows or length > have_length:
            more_rows = _capacity(have_rows, rows, self._slots) - have_rows
            more_length = _capacity(have_length, length, self._max_length) - have_length
            # zeros, not garbage: masked values are multiplied by 0 and must not be NaN
            padding = (0, 0, 0, more_length, 0, 0, 0, more_rows)
            self._layers[layer] = stored = tuple(pad(tensor, padding) for tensor in stored)
        return stored


def _capacity(have: int, need: int, most: int) -> int:
    """Grow by doubling, so that each token is copied a bounded number of times."""
    return have if need <= have else min(max(need, 2 * have), most)


def check_full_attention(policy: Any, max_model_len: int) -> None:
    """Refuse a model with layers other than full attention."""
    config = policy.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    kinds = set(kinds or ["sliding_attention" if window else "full_attention"])
    if window and window >= max_model_len:
        kinds.discard("sliding_attention")  # the window never slides
    others = kinds - {"full_attention"}
    if others or getattr(policy, "_is_stateful", False):
        raise UsageError(
            f"`TransformersEngine` cannot decode {config.model_type!r}: it has layers without full "
            f"attention ({', '.join(sorted(others)) or 'recurrent'}). Use `VLLMEngine`."
        )
    model = getattr(policy, "get_base_model", lambda: policy)()  # inside a PEFT wrapper
    told = "position_ids" in inspect.signature(model.forward).parameters
    if config.model_type not in _RELATIVE and (not told or getattr(config, "alibi", False)):
        raise UsageError(
            f"`TransformersEngine` cannot decode {config.model_type!r}: it counts its positions "
            "itself and takes no `position_ids`, and completions of a batch are at different ones. "
            "Use `VLLMEngine`."
        )


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Use `_attend`, which does not copy keys and values for every query head."""
    before = config._attn_implementation
    if before != "eager":  # some models need eager attention
        config._attn_implementation = "lit_rlsched_decode"
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one position, with all query heads of a key head in one."""
    batch, heads = query.shape[:2]
    query = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, 1, -1).transpose(1, 2), None


AttentionInterface.register("lit_rlsched_decode", _attend)
