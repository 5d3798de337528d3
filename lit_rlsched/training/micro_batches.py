"""Split an optimizer step's completions into rows of token ids and padded micro-batches.

Several completions of a group may share a row with their prompt.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from lit_rlsched.scheduling.routing import share
from lit_rlsched.types import Completion, Sample

ZERO_ADVANTAGE = 1e-8
"""A smaller advantage is the rounding error of a group with equal rewards."""

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
        ids = [array("i", row.samples[0].group.prompt.token_ids) for row in prompt_rows]
        for of_row, row in zip(ids, prompt_rows, strict=True):
            for sample in row.samples:
                of_row.extend(sample.completion.token_ids)
        rows = None
        if any(row.shared for row in prompt_rows):
            rows = torch.tensor([i for i, row in enumerate(prompt_rows) for _ in row.samples])
        return cls(
            pad(ids, torch.long),
            torch.tensor([len(s.group.prompt.token_ids) for s in samples]),
            torch.tensor([len(s.completion.token_ids) for s in samples]),
            rows,
        )

    def to(self, device: torch.device) -> "EncodedRows":
        """Move all of it."""
        ids, prompts, completions, rows = self
        rows = None if rows is None else rows.to(device)
        return EncodedRows(ids.to(device), prompts.to(device), completions.to(device), rows)


class MicroBatch:
    """Input of one forward and backward pass: `B` completions in `R` right-padded rows.

    `R` is `B`, or less where completions share a prompt. This is not a dataclass because
    `precision="bf16-true"` would cast the log-probs of one.

    Attributes:
        input_ids: `[R, T]`, prompts and completions. Causal models need no mask for the padding.
        completion_rows: `[B]`, the row of each completion, or `None` if each has its own row.
        prompt_lengths: `[B]`.
        completion_lengths: `[B]`.
        completion_mask: `[B, C]`, 1 on tokens that are trained on.
        advantages: `[B]`.
        rollout_logp: `[B, C]`, log-probs recorded by the engine that drew the tokens.
        old_logp: `[B, C]`, the trainer's log-probs under the weights at the start of the round, or
            `None` for the only step of a round, where the forward pass gives the same values.
        ref_logp: `[B, C]`, log-probs under the reference model, or `None`.
        temperature: The sampling temperature.
        truncated_sampling: Whether tokens were drawn with top-p, top-k or min-p. `rollout_logp`
            then belongs to the truncated distribution and is not comparable with the trainer's.
        step_sequences: Completions of the whole optimizer step, trained on or not.
        step_tokens: Tokens in the loss of the whole optimizer step; with several steps in the
            round, their average.
        own_tokens: The same of this step alone.
        off_policy: Whether tokens drawn by earlier policies may be included.
        max_completion_length: Maximum number of tokens per completion in the rollout.
        is_first: Whether this is the first micro-batch of its optimizer step, or of a part of it.
        is_last: Whether this is the last one.
        scale: Factor of the loss before the backward pass: the number of ranks, which average their
            gradients, or 0 for a micro-batch that another rank has too.
    """

    def __init__(
        self,
        prompt_rows: Sequence[PromptRow],
        step: "StepTotals",
        *,
        is_first: bool,
        is_last: bool,
        scale: float = 1.0,
    ) -> None:
        samples = [sample for row in prompt_rows for sample in row.samples]
        completions = [sample.completion for sample in samples]
        sampling = samples[0].group.sampling
        self.temperature = sampling.temperature
        self.truncated_sampling = sampling.truncated
        self.max_completion_length = sampling.max_completion_length
        self.step_sequences = step.sequences
        self.step_tokens = step.tokens
        self.own_tokens = step.tokens if step.own_tokens is None else step.own_tokens
        self.off_policy = step.off_policy
        self.is_first = is_first
        self.is_last = is_last
        self.scale = scale
        encoded = EncodedRows.of(prompt_rows)
        self.input_ids, self.prompt_lengths, self.completion_lengths = encoded[:3]
        self.completion_rows = encoded.completion_rows
        self.completion_mask = pad([c.mask(step.version) for c in completions])
        self.advantages = pad([[c.advantage] for c in completions]).squeeze(1)
        self.rollout_logp = pad([c.logprobs for c in completions])
        self.old_logp = _pad_optional([c.old_logprobs for c in completions])
        self.ref_logp = _pad_optional([c.ref_logprobs for c in completions])

    @property
    def logprob_inputs(self) -> dict[str, Any]:
        """Arguments of `completion_logprobs`."""
        return {
            "input_ids": self.input_ids,
            "prompt_lengths": self.prompt_lengths,
            "completion_lengths": self.completion_lengths,
            "completion_rows": self.completion_rows,
            "temperature": self.temperature,
        }

    @property
    def loss_inputs(self) -> dict[str, Any]:
        """Arguments of `policy_loss`, besides `logp` and the settings of the loss.

        After truncated sampling `rollout_logp` is `None`, which switches the correction off.
        """
        return {
            "advantages": self.advantages,
            "mask": self.completion_mask,
            "old_logp": self.old_logp,
            "ref_logp": self.ref_logp,
            "rollout_logp": None if self.truncated_sampling else self.rollout_logp,
            "step_sequences": self.step_sequences,
            "step_tokens": self.step_tokens,
            "max_completion_length": self.max_completion_length,
        }

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "MicroBatch":
        """Move every tensor, in place."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device, non_blocking=non_blocking))
        return self


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Normalisers of an optimizer step's loss."""

    sequences: int
    tokens: float
    off_policy: bool = False
    version: int | None = None
    """Train only on tokens drawn by this policy version; `None`: by any."""
    own_tokens: float | None = None
    """Tokens of the step, if `tokens` is an average over several."""

    def trained(self, completion: Completion) -> int:
        """Number of tokens trained on."""
        if self.version is None:
            return completion.drawn
        return int(sum(completion.mask(self.version)))


class PaddingCount(NamedTuple):
    """Positions of micro-batches, and how many of them are padding."""

    positions: int
    padding: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What of its completions a step trains on."""

    mask_truncated: bool = False
    """Leave truncated completions out of the loss."""
    skip_zero_advantage: bool = False
    """Skip completions with zero advantage in the passes. They still count in the normalisers, so
    the gradient is the same if the loss has no other term."""
    off_policy: bool = False
    """Whether tokens drawn by earlier policies may be included."""
    only_version: int | None = None
    """Train only on tokens drawn by this policy version; `None`: by any."""


class OptimizerStep:
    """The micro-batches of one optimizer step, built one at a time.

    Args:
        samples: The step's completions.
        micro_batch_tokens: Maximum positions of one micro-batch, padding included.
        trained: What of the completions is trained on; by default all.
        row_cost: Cost by which completions of a group share a row with one prompt. `None`: each has
            its own row.
        divisor: Sequences and tokens to divide the losses by, for a part of a step whose totals are
            not known yet.
        accumulated: Parts of this step whose gradients are already accumulated, all with the same
            `divisor`. Their completions are skipped; the losses of the others divide by it, too.
        rank: Rank of this process, which iterates over its share of the micro-batches, and number
            of ranks, which get equally many; see `scheduling.routing`.

    Attributes:
        samples: The completions that the loss is defined on, including skipped ones.
        totals: Sequences and tokens of the step.
        divisor: Divisor of the losses of the micro-batches.
        groups: The groups of all completions.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        micro_batch_tokens: int,
        trained: Trained = Trained(),
        *,
        row_cost: RowCost | None = None,
        divisor: tuple[int, int] | None = None,
        accumulated: Sequence["OptimizerStep"] = (),
        rank: tuple[int, int] = (0, 1),
    ) -> None:
        self._rank, self._ranks = rank
        self.groups = [*{s.group.id: s.group for s in samples}.values()]
        samples = [s for s in samples if not s.completion.dropped]
        totals = StepTotals(len(samples), 0, trained.off_policy, trained.only_version)
        if trained.mask_truncated:
            samples = [s for s in samples if s.completion.finish_reason != "length"]
        self.samples = [s for s in samples if totals.trained(s.completion)]
        tokens = sum(totals.trained(s.completion) for s in self.samples)
        self.totals = replace(totals, tokens=tokens)
        self.accumulated = accumulated
        self.divisor: StepTotals = accumulated[0].divisor if accumulated else self.totals
        if divisor is not None:
            self.divisor = replace(self.totals, sequences=divisor[0], tokens=divisor[1])
        skips = trained.skip_zero_advantage
        done = {group.id for part in accumulated for group in part.groups}
        self._encoded = [
            s
            for s in self.samples
            if s.group.id not in done and (s.completion.advantage or not skips)
        ]
        self._micro_batch_tokens = micro_batch_tokens
        self._least_price = PASS if divisor or accumulated else 0
        self._row_cost = row_cost

    @cached_property
    def _batches(self) -> list[list[PromptRow]]:
        """Rows of each micro-batch."""
        tokens = self._micro_batch_tokens
        rows = share_prompts(self._encoded, self._row_cost, tokens)
        longest = max(map(len, rows), default=0)
        while True:
            batches = split_rows(rows, tokens, self._least_price)
            if len(batches) >= min(self._ranks, len(rows)) or tokens <= longest:
                return batches
            tokens = max(longest, tokens // 2)  # a rank without a micro-batch would be idle

    @property
    def micro_batches(self) -> list[list[Sample]]:
        """The completions of each micro-batch, in the order of its tensors."""
        return [[sample for row in rows for sample in row.samples] for rows in self._batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        passes = share([max(map(len, rows)) * len(rows) for rows in self._batches], self._ranks)
        for number, of_pass in enumerate(passes):
            item, counts = of_pass[self._rank]
            yield MicroBatch(
                self._batches[item],
                self.divisor,
                is_first=number == 0,
                is_last=number == len(passes) - 1,
                scale=float(self._ranks) if counts else 0.0,
            )

    def padding(self) -> PaddingCount:
        """Count positions and padding, of the accumulated parts too, without building tensors."""
        lengths = [[len(row) for row in rows] for rows in self._batches]
        positions = sum(max(of_rows) * len(of_rows) for of_rows in lengths)
        parts = [PaddingCount(positions, positions - sum(map(sum, lengths)))]
        parts += [part.padding() for part in self.accumulated]
        return PaddingCount(sum(p.positions for p in parts), sum(p.padding for p in parts))


def share_prompts(
    samples: Sequence[Sample], cost: RowCost | None, micro_batch_tokens: int
) -> list[PromptRow]:
    """Put completions of a group into one row where that is cheaper than a row for each.

    A row with several completions has at most `micro_batch_tokens` and `MASKED_POSITIONS`
    positions. Without a `cost` nothing is shared.
    """
    if cost is None:
        return [PromptRow((sample,)) for sample in samples]
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group.id, []).append(sample)
    rows: list[PromptRow] = []
    for group in groups.values():
        group.sort(key=len)

        def costs(end: int, group: list[Sample] = group) -> Iterator[tuple[float, int]]:
            length = len(group[end - 1])
            yield cost(length, False), end - 1
            for start in range(end - 2, -1, -1):
                length += len(group[start].completion.token_ids)
                if length > min(micro_batch_tokens, MASKED_POSITIONS):
                    return
                yield cost(length, True), start

        together = [PromptRow(tuple(run)) for run in _cheapest_split(group, costs)]
        alone = [PromptRow((sample,)) for sample in group]
        shared_cost, separate_cost = (
            sum(cost(len(row), row.shared) for row in option) for option in (together, alone)
        )
        rows += together if shared_cost <= WORTHWHILE * separate_cost else alone
    return rows


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

    The split minimises padded positions plus a price per micro-batch, of which `least_price` is a
    lower bound for calls that compute only a part of a round.
    """
    rows = sorted(rows, key=len)
    lengths = [len(row) for row in rows]
    # a pass costs about as much as 1/256 of all positions on the quick task
    price = max(sum(lengths) // 256, least_price)

    def costs(end: int) -> Iterator[tuple[float, int]]:
        widest = lengths[end - 1]
        first = max(0, end - max(1, micro_batch_tokens // widest))
        return ((widest * (end - start) + price, start) for start in range(first, end))

    return _cheapest_split(rows, costs)


def _cheapest_split(
    items: Sequence[T], costs: Callable[[int], Iterable[tuple[float, int]]]
) -> list[list[T]]:
    """Split items into the cheapest runs, given cost and start of each run that may end there."""
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


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return rows as a right-padded matrix, in float64 in a pass of `64-true`, else float32."""
    # in `bf16-true` the default is bf16
    dtype = dtype or torch.promote_types(torch.get_default_dtype(), torch.float32)
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.from_numpy(np.asarray(row))  # copies no array
    return padded


def _pad_optional(rows: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
    return None if rows[0] is None else pad([row or () for row in rows])
