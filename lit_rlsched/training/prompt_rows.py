"""Rows of token ids: which completions share one with a prompt, and which share a micro-batch."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lit_rlsched.types import Sample

MASKED_POSITIONS = 2**14
"""Maximum positions of a micro-batch with an attention mask, which then has at most `2**28`
entries: 256 MiB, or 1 GiB where PyTorch's attention converts the mask to fp32."""

WORTHWHILE = 0.8
"""Completions share a prompt only if that costs at most this fraction of separate rows: sharing
changes the rounding and gives more and smaller micro-batches."""

PASS = 128
"""Positions that cost about as much as one more forward pass over the quick task's model."""

T = TypeVar("T", bound=Sized)


@dataclass(frozen=True, slots=True)
class RowCost:
    """FLOPs in matrix products of a forward pass over one row of `input_ids`."""

    position: float
    """Per position, without attention."""
    causal: float
    """Attention per pair of positions, in a row with one completion."""
    masked: float
    """Attention per pair of positions, in a row with several completions."""

    def __call__(self, length: int, shared: bool) -> float:
        return self.position * length + (self.masked if shared else self.causal) * length**2


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of `input_ids`: a prompt followed by one or more of its completions."""

    samples: tuple[Sample, ...]
    """All of one group."""

    @property
    def token_ids(self) -> "array[int]":
        """The prompt once, then each completion."""
        ids = array("i", self.samples[0].group.prompt.token_ids)
        for sample in self.samples:
            ids.extend(sample.completion.token_ids)
        return ids

    @property
    def shared(self) -> bool:
        """Whether several completions share the prompt."""
        return len(self.samples) > 1

    def __len__(self) -> int:
        first, *others = self.samples
        return len(first) + sum(len(sample.completion.token_ids) for sample in others)


class EncodedRows(NamedTuple):
    """`B` completions in `R` right-padded rows; see `MicroBatch`."""

    input_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    completion_lengths: torch.Tensor
    completion_rows: torch.Tensor | None

    @classmethod
    def of(cls, prompt_rows: Sequence[PromptRow]) -> "EncodedRows":
        """Encode some rows."""
        samples = [sample for row in prompt_rows for sample in row.samples]
        rows = None
        if any(row.shared for row in prompt_rows):
            rows = torch.tensor([i for i, row in enumerate(prompt_rows) for _ in row.samples])
        return cls(
            pad([row.token_ids for row in prompt_rows], torch.long),
            torch.tensor([len(s.group.prompt.token_ids) for s in samples]),
            torch.tensor([len(s.completion.token_ids) for s in samples]),
            rows,
        )

    def to(self, device: torch.device) -> "EncodedRows":
        """Move all of it."""
        ids, prompts, completions, rows = self
        rows = None if rows is None else rows.to(device)
        return EncodedRows(ids.to(device), prompts.to(device), completions.to(device), rows)


def share_prompts(
    samples: Sequence[Sample], cost: RowCost | None, micro_batch_tokens: int
) -> list[PromptRow]:
    """Put completions of a group into one row where that is cheaper than a row for each.

    A group's completions are sorted by length and split into rows at the least total cost. A row
    with several completions has at most `micro_batch_tokens` and `MASKED_POSITIONS` positions.
    Without a `cost` nothing is shared.
    """
    if cost is None:
        return [PromptRow((sample,)) for sample in samples]
    longest = min(micro_batch_tokens, MASKED_POSITIONS)
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group.id, []).append(sample)
    rows: list[PromptRow] = []
    for group in groups.values():
        group.sort(key=len)
        runs = _cheapest_split(group, partial(_row_costs, cost, group, longest))
        together = [PromptRow(tuple(run)) for run in runs]
        alone = [PromptRow((sample,)) for sample in group]
        shared_cost, separate_cost = (
            sum(cost(len(row), row.shared) for row in option) for option in (together, alone)
        )
        rows += together if shared_cost <= WORTHWHILE * separate_cost else alone
    return rows


def _row_costs(
    cost: RowCost, group: Sequence[Sample], longest: int, end: int
) -> Iterator[tuple[float, int]]:
    """Yield the cost of a row with the completions `start` to `end`, and `start`."""
    length = len(group[end - 1])
    yield cost(length, False), end - 1
    for start in range(end - 2, -1, -1):
        length += len(group[start].completion.token_ids)
        if length > longest:
            return
        yield cost(length, True), start


def split_rows(
    rows: Sequence[PromptRow], micro_batch_tokens: int, least_price: int = 0
) -> list[list[PromptRow]]:
    """Split rows by `split_by_tokens`, apart from shared ones: the others need no mask."""
    alone, shared = ([row for row in rows if row.shared is of_kind] for of_kind in (False, True))
    return [
        *split_by_tokens(alone, micro_batch_tokens, least_price),
        *split_by_tokens(shared, min(micro_batch_tokens, MASKED_POSITIONS), least_price),
    ]


def split_by_tokens(
    rows: Sequence[T], micro_batch_tokens: int, least_price: int = 0
) -> list[list[T]]:
    """Sort rows by length and split them into runs of at most `micro_batch_tokens` positions.

    The split minimises padded positions plus a price per micro-batch; rows of equal length keep
    their order. A pass costs about as much as 1/256 of all positions on the quick task; with this
    price padding stays below 5 % there and hardly depends on `micro_batch_tokens`. `least_price`
    is a lower bound of it, for calls that compute only a part of a round.
    """
    rows = sorted(rows, key=len)
    lengths = [len(row) for row in rows]
    price = max(sum(lengths) // 256, least_price)

    def costs(end: int) -> Iterator[tuple[float, int]]:
        widest = lengths[end - 1]
        first = max(0, end - max(1, micro_batch_tokens // widest))
        return ((widest * (end - start) + price, start) for start in range(first, end))

    return _cheapest_split(rows, costs)


def _cheapest_split(
    items: Sequence[T], costs: Callable[[int], Iterable[tuple[float, int]]]
) -> list[list[T]]:
    """Split items into runs at the least total cost, by dynamic programming.

    `costs` returns the cost and the start of each allowed run that ends before a position.
    """
    best = [0.0] * (len(items) + 1)
    cut = [0] * (len(items) + 1)
    for end in range(1, len(items) + 1):
        best[end], cut[end] = min((best[start] + cost, start) for cost, start in costs(end))
    runs: list[list[T]] = []
    end = len(items)
    while end:
        runs.append(list(items[cut[end] : end]))
        end = cut[end]
    return runs[::-1]


def float_dtype() -> torch.dtype:
    """Return float64 in a pass of `64-true`, else float32; in `bf16-true` the default is bf16."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return rows as a right-padded matrix."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype or float_dtype())
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.from_numpy(np.asarray(row))  # copies no array
    return padded
