"""From ragged completions to padded micro-batches: the only place where anything is padded."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import torch

from lit_rlsched.types import Completion, Sample, stable_hash

MASKED_POSITIONS = 2**14
"""Most positions of a micro-batch whose attention takes a mask: they bound it to `2**28` entries,
256 MiB, and 1 GiB where PyTorch's attention turns it into fp32."""

WORTHWHILE = 0.8
"""Share of the cost above which completions keep to rows of their own: rounding differs where they
share one, and micro-batches with a mask are more and smaller."""

T = TypeVar("T", bound=Sized)


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a forward pass over a row of `input_ids` costs, in FLOPs of matrix products.

    Calling it with a row's length and whether completions share it gives the cost.
    """

    position: float
    """Of everything but attention, for each position."""
    causal: float
    """Of attention, for each pair of positions, in a row of one completion."""
    masked: float
    """Of attention, for each pair of positions, in a row of several."""

    def __call__(self, length: int, shared: bool) -> float:
        return self.position * length + (self.masked if shared else self.causal) * length**2


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of `input_ids`: a prompt followed by one or more of its completions."""

    rows: tuple[Sample, ...]
    """The completions, all of one group."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt once, then each completion."""
        completions = [t for row in self.rows for t in row.completion.token_ids]
        return [*self.rows[0].group.prompt.token_ids, *completions]

    @property
    def shared(self) -> bool:
        """Whether it has more than one completion, which must not see each other."""
        return len(self.rows) > 1

    def __len__(self) -> int:
        first, *others = self.rows
        return len(first) + sum(len(row.completion.token_ids) for row in others)


class MicroBatch:
    """What one forward and backward pass sees: rows of about the same length, right padded.

    A row is a prompt and its completion: `B` rows. Where the learner shares prompts, it is a prompt
    and several of its completions, one after the other: then there are `R < B` rows.

    An ordinary class and not a dataclass: `precision="bf16-true"` would cast the log-probs of one.

    Attributes:
        input_ids: `[R, T]` prompt and completions, right padded. The model is causal: padding needs
            no attention mask, what stands right of a token cannot change it.
        completion_rows: `[B]` the row each completion stands in, or `None` where each has its own.
        prompt_lengths: `[B]`.
        completion_lengths: `[B]`.
        completion_mask: `[B, C]`, 1 on tokens that are trained on.
        advantages: `[B]`.
        rollout_logp: `[B, C]` log-probs by the engine that drew the tokens.
        old_logp: `[B, C]` log-probs by the trainer under the weights of the round, or `None`
            where a step is the only one on its round (they are those of the forward pass).
        ref_logp: `[B, C]` log-probs by the reference model, or `None`.
        temperature: The one the tokens were drawn at.
        truncated_sampling: Whether tokens were drawn by top-p, top-k or min-p: `rollout_logp` is
            then of the truncated distribution, and does not compare with the trainer's.
        step_sequences: Sequences of the whole optimizer step, trained on or not.
        step_tokens: Tokens of the whole optimizer step that the loss is defined on; the average of
            the round's steps where it has several.
        off_policy: Whether tokens that an earlier policy drew may be among them.
        max_completion_length: The limit they were drawn under.
        is_first: Whether this is the first micro-batch of its optimizer step, or of a part of it.
        is_last: Whether this is the last micro-batch of its optimizer step, or of a part of it.
    """

    input_ids: torch.Tensor
    completion_rows: torch.Tensor | None
    prompt_lengths: torch.Tensor
    completion_lengths: torch.Tensor
    completion_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_logp: torch.Tensor
    old_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None

    def __init__(
        self, prompt_rows: Sequence[PromptRow], step: "StepTotals", *, is_first: bool, is_last: bool
    ) -> None:
        rows = [row for prompt_row in prompt_rows for row in prompt_row.rows]
        completions = [row.completion for row in rows]
        sampling = rows[0].group.sampling
        self.temperature = sampling.temperature
        self.truncated_sampling = sampling.truncated
        self.max_completion_length = sampling.max_completion_length
        self.step_sequences = step.sequences
        self.step_tokens = step.tokens
        self.off_policy = step.off_policy
        self.is_first = is_first
        self.is_last = is_last
        self.prompt_lengths = torch.tensor([len(row.group.prompt.token_ids) for row in rows])
        self.completion_lengths = torch.tensor([len(c.token_ids) for c in completions])
        self.input_ids = _pad([row.token_ids for row in prompt_rows], torch.long)
        self.completion_rows = None
        if any(row.shared for row in prompt_rows):
            at = [i for i, prompt_row in enumerate(prompt_rows) for _ in prompt_row.rows]
            self.completion_rows = torch.tensor(at)
        self.completion_mask = _pad([step.mask(c) for c in completions])
        # float32 by name: in bf16-true training it would be the default dtype, bf16
        self.advantages = torch.tensor([c.advantage for c in completions], dtype=torch.float32)
        self.rollout_logp = _pad([c.logprobs for c in completions])
        self.old_logp = _pad_optional([c.old_logprobs for c in completions])
        self.ref_logp = _pad_optional([c.ref_logprobs for c in completions])

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "MicroBatch":
        """Move every tensor, in place."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device, non_blocking=non_blocking))
        return self


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What the losses divide by, and which tokens they are defined on."""

    sequences: int
    tokens: float
    off_policy: bool = False
    version: int | None = None
    """The policy version that tokens must be of to be trained on; `None`: any."""

    def trained(self, completion: Completion) -> int:
        """How many tokens of a completion are trained on: the last ones."""
        if self.version is None:
            return len(completion.token_ids)
        return completion.tokens_of(self.version)

    def mask(self, completion: Completion) -> list[float]:
        """1 for each token that is trained on."""
        trained = self.trained(completion)
        return [0.0] * (len(completion.token_ids) - trained) + [1.0] * trained


@dataclass(slots=True)
class PaddingCount:
    """Positions of the micro-batches, and how many of them are padding."""

    positions: int = 0
    padding: int = 0


class OptimizerStep:
    """The micro-batches of one optimizer step, made one at a time.

    Args:
        rows: The step's completions.
        micro_batch_tokens: Most positions, padding included, of one micro-batch.
        mask_truncated: Whether completions cut at the limit are left out of the loss.
        skip_zero_advantage: Whether rows whose advantage is zero are left out of the passes. They
            still count in the normalisers: where the loss has no other term, the gradient is the
            same.
        off_policy: Whether tokens that an earlier policy drew may be among them.
        only_version: The policy version that tokens must be of to be trained on; `None`: any.
        row_cost: Gives, for the rows that are encoded and `micro_batch_tokens`, the cost by which
            completions of a group share a row with one prompt where that is cheaper; without one,
            each has a row of its own.
        divisor: Sequences and tokens that the losses divide by, where the totals of all of which
            these rows are a part are not known yet.
        accumulated: Parts of this step of which the gradient is there already, all with the same
            `divisor`: their rows are left out of the passes, and those of the others divide by it.
    """

    def __init__(
        self,
        rows: Sequence[Sample],
        micro_batch_tokens: int,
        *,
        mask_truncated: bool = False,
        skip_zero_advantage: bool = False,
        off_policy: bool = False,
        only_version: int | None = None,
        row_cost: Callable[[Sequence[Sample], int], RowCost | None] | None = None,
        divisor: tuple[int, int] | None = None,
        accumulated: Sequence["OptimizerStep"] = (),
    ) -> None:
        rows = [r for r in rows if not r.completion.dropped]
        totals = StepTotals(len(rows), 0, off_policy, only_version)
        if mask_truncated:
            rows = [r for r in rows if r.completion.finish_reason != "length"]
        rows = [r for r in rows if totals.trained(r.completion)]
        self.rows = rows
        """Those the loss is defined on, trained on or not."""
        self.totals = replace(totals, tokens=sum(totals.trained(r.completion) for r in rows))
        self.accumulated = accumulated
        self.divisor: StepTotals = accumulated[0].divisor if accumulated else self.totals
        """What the losses of its micro-batches divide by."""
        if divisor is not None:
            sequences, tokens = divisor
            self.divisor = replace(self.totals, sequences=sequences, tokens=tokens)
        before = {row.id for part in accumulated for row in part.rows}
        self._encoded = [
            r
            for r in rows
            if r.id not in before and (r.completion.advantage or not skip_zero_advantage)
        ]
        self._micro_batch_tokens = micro_batch_tokens
        self._row_cost = row_cost

    @cached_property
    def _prompt_rows(self) -> list[list[PromptRow]]:
        rows, tokens = self._encoded, self._micro_batch_tokens
        cost = self._row_cost(rows, tokens) if self._row_cost else None
        prompt_rows = share_prompts(rows, cost, tokens)
        # apart: a micro-batch without shared rows needs no mask
        alone = [row for row in prompt_rows if not row.shared]
        shared = [row for row in prompt_rows if row.shared]
        return [
            *split_by_tokens(alone, tokens),
            *split_by_tokens(shared, min(tokens, MASKED_POSITIONS)),
        ]

    @property
    def micro_batches(self) -> list[list[Sample]]:
        """The completions of each micro-batch, in the order of its tensors."""
        return [[row for part in batch for row in part.rows] for batch in self._prompt_rows]

    def __len__(self) -> int:
        return len(self._prompt_rows)

    def __iter__(self) -> Iterator[MicroBatch]:
        last = len(self) - 1
        for i, rows in enumerate(self._prompt_rows):
            yield MicroBatch(rows, self.divisor, is_first=i == 0, is_last=i == last)

    def padding(self) -> PaddingCount:
        """Count positions, those accumulated before included, without making a tensor."""
        parts = [part.padding() for part in self.accumulated]
        count = PaddingCount(
            sum(part.positions for part in parts), sum(part.padding for part in parts)
        )
        for rows in self._prompt_rows:
            lengths = [len(row) for row in rows]
            count.positions += max(lengths) * len(rows)
            count.padding += max(lengths) * len(rows) - sum(lengths)
        return count


def share_prompts(
    rows: Sequence[Sample], cost: RowCost | None, micro_batch_tokens: int
) -> list[PromptRow]:
    """Put completions of a group into one row where that is cheaper than a row for each.

    Of each group's completions, sorted by length, the cheapest cut into rows. No row of several is
    longer than `micro_batch_tokens` and `MASKED_POSITIONS`. Without a `cost` none is shared.
    """
    if cost is None:
        return [PromptRow((row,)) for row in rows]
    longest = min(micro_batch_tokens, MASKED_POSITIONS)
    groups: dict[str, list[Sample]] = {}
    for row in rows:
        groups.setdefault(row.group.id, []).append(row)
    shared: list[PromptRow] = []
    for group in groups.values():
        group.sort(key=len)
        prompt = len(group[0].group.prompt.token_ids)
        completions = [len(row.completion.token_ids) for row in group]
        cuts = _cheapest_cut(group, partial(_row_costs, cost, prompt, completions, longest))
        together = [PromptRow(tuple(cut)) for cut in cuts]
        alone = [PromptRow((row,)) for row in group]
        saves = _cost(together, cost) <= WORTHWHILE * _cost(alone, cost)
        shared += together if saves else alone
    return shared


def _cost(rows: Iterable[PromptRow], cost: RowCost) -> float:
    return sum(cost(len(row), row.shared) for row in rows)


def _row_costs(
    cost: RowCost, prompt: int, completions: Sequence[int], longest: int, end: int
) -> Iterator[tuple[float, int]]:
    """What a row of the completions from `start` to `end` costs, and `start`, for each start."""
    yield cost(prompt + completions[end - 1], False), end - 1
    length = prompt + completions[end - 1]
    for start in range(end - 2, -1, -1):
        length += completions[start]
        if length > longest:
            return
        yield cost(length, True), start


def split_by_tokens(rows: Sequence[T], micro_batch_tokens: int) -> list[list[T]]:
    """Cut rows, sorted by length, into runs of at most `micro_batch_tokens` padded positions.

    The cut is the cheapest in padded positions plus a price for each micro-batch, found by dynamic
    programming over the sorted rows; equal lengths keep the order they came in. At a price of 1/256
    of all positions, padding stays below 5 % on the quick task and hardly depends on the budget,
    which limits memory alone; there, a pass costs about what that many positions do.
    """
    rows = sorted(rows, key=len)
    lengths = [len(row) for row in rows]
    price = sum(lengths) // 256

    def costs(end: int) -> Iterator[tuple[float, int]]:
        widest = lengths[end - 1]
        first = max(0, end - max(1, micro_batch_tokens // widest))
        return ((widest * (end - start) + price, start) for start in range(first, end))

    return _cheapest_cut(rows, costs)


def _cheapest_cut(
    rows: Sequence[T], costs: Callable[[int], Iterable[tuple[float, int]]]
) -> list[list[T]]:
    """Cut rows into runs at the least total cost, by dynamic programming.

    Args:
        rows: What is cut, in order.
        costs: The cost and the start of each run that may end before a position.
    """
    best = [0.0] * (len(rows) + 1)
    cut = [0] * (len(rows) + 1)
    for end in range(1, len(rows) + 1):
        best[end], cut[end] = min((best[start] + cost, start) for cost, start in costs(end))
    runs: list[list[T]] = []
    end = len(rows)
    while end:
        runs.append(list(rows[cut[end] : end]))
        end = cut[end]
    return runs[::-1]


def split_steps(num_groups: int, steps_per_round: int, *seed_parts: object) -> list[list[int]]:
    """Deal a round's groups out to its optimizer steps; the order depends on `seed_parts` alone.

    Returns:
        `steps_per_round` lists of group positions, equally long where that is possible.
    """
    order = list(range(num_groups))
    if steps_per_round > 1:
        random.Random(stable_hash(*seed_parts)).shuffle(order)
    ends = [i * num_groups // steps_per_round for i in range(steps_per_round + 1)]
    return [order[start:end] for start, end in pairwise(ends)]


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def _pad_optional(rows: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
    return None if rows[0] is None else _pad([row or () for row in rows])
