"""From ragged completions to padded micro-batches: the only place where anything is padded."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lit_rlsched.rollout.types import Completion, Row, stable_hash


class MicroBatch:
    """What one forward and backward pass sees: sequences of about the same length, right padded.

    An ordinary class and not a dataclass: `precision="bf16-true"` would cast the log-probs of one.

    Attributes:
        input_ids: `[B, T]` prompt and completion, right padded. The model is causal: no attention
            mask is needed, what stands right of a token cannot change it.
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
        step_tokens: Tokens of the whole optimizer step that the loss is defined on.
        off_policy: Whether tokens that an earlier policy drew may be among them.
        max_completion_length: The limit they were drawn under.
        is_first: Whether this is the first micro-batch of its optimizer step.
        is_last: Whether this is the last micro-batch of its optimizer step.
    """

    input_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    completion_lengths: torch.Tensor
    completion_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_logp: torch.Tensor
    old_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None

    def __init__(
        self, rows: Sequence[Row], step: "StepTotals", *, is_first: bool, is_last: bool
    ) -> None:
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
        self.input_ids = _pad([row.token_ids for row in rows], torch.long)
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
    tokens: int
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
    """

    def __init__(
        self,
        rows: Sequence[Row],
        micro_batch_tokens: int,
        *,
        mask_truncated: bool = False,
        skip_zero_advantage: bool = False,
        off_policy: bool = False,
        only_version: int | None = None,
    ) -> None:
        rows = [r for r in rows if not r.completion.dropped]
        totals = StepTotals(len(rows), 0, off_policy, only_version)
        if mask_truncated:
            rows = [r for r in rows if r.completion.finish_reason != "length"]
        rows = [r for r in rows if totals.trained(r.completion)]
        self.rows = rows
        """Those the loss is defined on, trained on or not."""
        self.totals = replace(totals, tokens=sum(totals.trained(r.completion) for r in rows))
        trained = [r for r in rows if r.completion.advantage or not skip_zero_advantage]
        self.micro_batches = split_by_tokens(trained, micro_batch_tokens)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        last = len(self.micro_batches) - 1
        for i, rows in enumerate(self.micro_batches):
            yield MicroBatch(rows, self.totals, is_first=i == 0, is_last=i == last)

    def padding(self) -> PaddingCount:
        """Count positions without making a tensor."""
        count = PaddingCount()
        for rows in self.micro_batches:
            lengths = [len(row) for row in rows]
            count.positions += max(lengths) * len(rows)
            count.padding += max(lengths) * len(rows) - sum(lengths)
        return count


def split_by_tokens(rows: Sequence[Row], micro_batch_tokens: int) -> list[list[Row]]:
    """Cut rows, sorted by length, into runs of at most `micro_batch_tokens` padded positions.

    The cut is the cheapest in padded positions plus a price for each micro-batch, found by dynamic
    programming over the sorted rows; equal lengths keep the order they came in. At a price of 1/256
    of all positions, padding stays below 5 % on the quick task and hardly depends on the budget,
    which limits memory alone; there, a pass costs about what that many positions do.
    """
    rows = sorted(rows, key=len)
    lengths = [len(row) for row in rows]
    price = sum(lengths) // 256
    best = [0.0] * (len(rows) + 1)
    cut = [0] * (len(rows) + 1)
    for end in range(1, len(rows) + 1):
        widest = lengths[end - 1]
        first = max(0, end - max(1, micro_batch_tokens // widest))
        best[end], cut[end] = min(
            (best[start] + widest * (end - start) + price, start) for start in range(first, end)
        )
    batches: list[list[Row]] = []
    end = len(rows)
    while end:
        batches.append(list(rows[cut[end] : end]))
        end = cut[end]
    return batches[::-1]


def split_steps(num_groups: int, steps_per_round: int, *seed_parts: object) -> list[list[int]]:
    """Deal a round's groups out to its optimizer steps; the order depends on `seed_parts` alone.

    Returns:
        `steps_per_round` lists of group positions, equally long.
    """
    order = list(range(num_groups))
    if steps_per_round > 1:
        random.Random(stable_hash(*seed_parts)).shuffle(order)
    size = num_groups // steps_per_round
    return [order[i * size : (i + 1) * size] for i in range(steps_per_round)]


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def _pad_optional(rows: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
    return None if rows[0] is None else _pad([row or () for row in rows])
