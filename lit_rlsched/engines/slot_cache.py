"""Key-value cache with a slot for every running request, and decode attention over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


class SlotCache:
    """What a transformers model writes to and reads from as its `past_key_values`.

    Takes its shapes from what the layers hand in, and grows up to `slots` rows of `max_length`.
    """

    is_compileable = False

    def __init__(self, slots: int, max_length: int) -> None:
        self._slots, self._max_length = slots, max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [slots, heads, length, head size]
        self._targets: list[list[int]] | None = None

    def prefill(self, targets: list[list[int]], length: int) -> None:
        """Row i of the next pass, of `length` tokens, goes to each of the slots `targets[i]`."""
        self._targets, self._length = targets, length
        self._target = [slot for slots in targets for slot in slots]
        self._source = [row for row, slots in enumerate(targets) for _ in slots]

    def decode(self, positions: Tensor, length: int) -> None:
        """The next pass is one token of each slot in use; the last position is `length - 1`."""
        self._targets, self._length = None, length
        self._rows, self._positions = (
            torch.arange(len(positions), device=positions.device),
            positions,
        )

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions from slot to slot; no slot may be on both sides."""
        for layer, stored in self._layers.items():
            for tensor in self._room(layer, *stored, max(targets) + 1, length):
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Store what a layer computed; return what it attends to."""
        length = self._length
        if self._targets is not None:
            room = self._room(layer, keys, values, max(self._target) + 1, length)
            for tensor, new in zip(room, (keys, values), strict=True):
                tensor[self._target, :, :length] = new[self._source]
            return keys, values
        room = self._room(layer, keys, values, len(keys), length)
        for tensor, new in zip(room, (keys, values), strict=True):
            tensor[self._rows, :, self._positions] = new[:, :, 0]
        return room[0][: len(keys), :, :length], room[1][: len(keys), :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Asked for in a prefill alone: a decode step brings its mask."""
        return query_length, 0

    def _room(
        self, layer: int, keys: Tensor, values: Tensor, rows: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """The layer's tensors, with at least `rows` slots of `length`."""
        old = self._layers.get(layer, ())
        have_rows, have_length = (old[0].shape[0], old[0].shape[2]) if old else (0, 0)
        if rows > have_rows or length > have_length:
            new_rows = _capacity(have_rows, rows, self._slots)
            new_length = _capacity(have_length, length, self._max_length)
            grown = []
            for i, like in enumerate((keys, values)):
                # zeros: attention multiplies what it masks by 0, which must not be NaN
                new = like.new_zeros(new_rows, like.shape[1], new_length, like.shape[3])
                if old:
                    new[:have_rows, :, :have_length] = old[i]
                grown.append(new)
            self._layers[layer] = grown[0], grown[1]
        return self._layers[layer]


def _capacity(have: int, need: int, most: int) -> int:
    """Double what is too small, so that a token is copied a bounded number of times."""
    return have if need <= have else min(max(need, 2 * have), most)


def check_full_attention(policy: Any, max_model_len: int) -> None:
    """Refuse what a cache of whole contexts cannot serve.

    Raises:
        ValueError: a layer slides a window, recurs or mixes otherwise.
    """
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
        raise ValueError(
            f"`TransformersEngine` cannot decode {config.model_type!r}: it has layers without full "
            f"attention ({', '.join(sorted(others)) or 'recurrent'}). Use `VLLMEngine`."
        )


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Let a model decode without a copy of the cache for every query head."""
    before = config._attn_implementation
    if before != "eager":  # which some models insist on, for what torch's attention cannot do
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
    """One query position: the heads that share a key head take the place of positions."""
    batch, heads = query.shape[:2]
    query = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, -1), None


AttentionInterface.register("lit_rlsched_decode", _attend)
